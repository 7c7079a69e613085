"""The live page in a real browser: it follows the file, keeps the last good state, and survives what a job may do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("watchfiles")

from tests.explore.browser import Browser, browser, needs_browser
from tests.explore.jobs import SMALL, line_of, write

pytestmark = [needs_browser(), pytest.mark.slow]

UP_TO_DATE = "document.getElementById('state').textContent.includes('up to date')"
TROUBLE = "document.getElementById('trouble').hidden === false"


@contextmanager
def explored(path: Path, cwd: Path | None = None) -> Iterator[str]:
    """The command, and the address that it printed."""
    command = (sys.executable, "-m", "outcore", "explore", str(path), "--on", "v100", "--no-open", "--seconds", "2")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": os.environ, "cwd": cwd}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        try:
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/\S+/", line)
            assert found is not None, line + process.stdout.read()
            yield found[0]
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=20)[0]
            assert (process.returncode, said) == (130, "interrupted\n")
        finally:
            process.kill()


def test_ctrl_c_while_a_page_is_open_is_one_word(tmp_path: Path) -> None:
    with explored(write(tmp_path)) as address:
        page = urllib.request.urlopen(f"{address}events", timeout=60)
        assert page.readline().startswith(b"data: ")
    page.read()  # ended by the server: what is cut off is an error


def chosen(page: Browser, selector: str, value: str) -> None:
    """Choose from a list, as a user does."""
    page(
        "const s = document.querySelector(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))",
        selector,
        value,
    )


def peak(page: Browser) -> str:
    return page.text(".memory .figure")


def test_saving_the_file_changes_the_page_and_errors_keep_the_last_state(tmp_path: Path) -> None:
    path = write(tmp_path)
    with explored(path) as address, browser() as page:
        page.driver.get(address)
        page.until("document.querySelector('.figure') !== null")
        page.until(UP_TO_DATE)
        before = peak(page)

        broken = SMALL.replace("self.second(a)", "self.missing(a)")
        path.write_text(broken)
        page.until(TROUBLE)
        assert f"job.py:{line_of(broken, 'self.missing(a)')}" in page.text("#trouble")
        assert "last state that worked" in page.text("#trouble") and peak(page) == before

        path.write_text("def model(:\n")
        page.until("document.getElementById('trouble').textContent.includes('SyntaxError')")
        assert peak(page) == before

        path.write_text(SMALL.replace("size = 4", "size = 8"))
        page.until("document.getElementById('trouble').hidden")
        page.until(UP_TO_DATE)
        assert peak(page) != before and "batch 8" in page.text("#facts")

        page.open("plan")
        select = "document.querySelector('.plan-block select')"
        page(f"{select}.value = 'recompute'; {select}.dispatchEvent(new Event('change', {{ bubbles: true }}))")
        page.until("document.querySelector('.plan-row.hand') !== null")
        assert "recomputes" in page.text(".plan-head") and "by hand" in page.text(".plan-row.hand")
        page.click(".plan-head .link")
        assert page.count(".plan-row.hand") == 0
        assert page.complaints() == []


def test_another_size_is_planned_for_a_step_is_run_and_a_run_is_watched(tmp_path: Path) -> None:
    path = write(tmp_path)
    with explored(path, cwd=tmp_path) as address, browser() as page:
        page.driver.get(address)
        page.until("document.querySelector('.figure') !== null")
        page.until(UP_TO_DATE)
        before = peak(page)
        page.press(".grid-charts .size:nth-child(1) .knob", "\ue00e")  # page up: half as much again
        assert page.text(".grid-charts .size:nth-child(1) .reading b") == "6"
        page.click(".resize")
        page.until("document.getElementById('facts').textContent.includes('batch 6')")
        page.until(UP_TO_DATE)
        assert "Everything here is for batch 6" in page.text(".verdict") and "-b 6 " in page.text(".verdict code")
        assert page.ask("document.querySelector('.verdict').textContent.includes('scaled')") is False
        page.click(".unsize")
        page.until("document.getElementById('facts').textContent.includes('batch 4')")
        page.until(UP_TO_DATE)
        assert peak(page) == before

        page.open("timeline")
        for plan in ("0", "1"):
            chosen(page, ".timeline select", plan)
            page.click(".measure")
            page.until("document.querySelector('.measure').disabled === false", 180)
            assert page.ask("document.querySelector('.timeline .pill').hidden"), page.text(".timeline .pill")
            assert "measured" in page.text(".timeline .note") and "the prediction" in page.text(".timeline .note")

        page.open("run")
        assert "No run yet" in page.text(".run-body")
        train = (sys.executable, "-m", "outcore", "train", "job.py", "--steps", "4", "--device", "cpu")
        done = subprocess.run(train, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        page.until("document.querySelector('.run-head')?.textContent.includes('finished') === true")
        assert page.count(".run-charts .chart") >= 2
        assert page.complaints() == []


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("print('x' * 100_000_000)", ""),
        ("import os; os._exit(3)", "exit code 3"),
        ("raise SystemExit(0)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_a_job_that_prints_leaves_or_interrupts_does_not_take_the_page_down(
    tmp_path: Path, does: str, said: str
) -> None:
    path = write(tmp_path, SMALL.replace("    return Net()", f"    {does}\n    return Net()"))
    with explored(path) as address, browser() as page:
        page.driver.get(address)
        page.until(TROUBLE if said else "document.querySelector('.figure') !== null")
        assert said in page.text("#trouble")
        path.write_text(SMALL)
        page.until("document.querySelector('.figure') !== null")
        page.until("document.getElementById('trouble').hidden")
