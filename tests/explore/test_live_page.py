"""The live page in a real browser: it follows the file, keeps the last good state, and survives what a job may do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
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
def explored(path: Path) -> Iterator[str]:
    """The command, and the address that it printed."""
    command = (sys.executable, "-m", "outcore", "explore", str(path), "--on", "v100", "--no-open", "--seconds", "2")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": os.environ}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        try:
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/\S+/", line)
            assert found is not None, line + process.stdout.read()
            yield found[0]
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()


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
