"""The command itself: what needs no torch does not wait for it, and messages say what can be typed."""

from __future__ import annotations

import errno
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

from outcore.cli.common.wording import typed
from outcore.cli.main import _FILES, COMMANDS, _is_interruption
from outcore.errors import OutcoreError
from outcore.planner import SCHEDULES
from outcore.program.plan.document import BatchNorm
from tests.cli.command import outcore_command


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["trian"]])
def test_what_needs_no_torch_does_not_import_it(arguments: list[str]) -> None:
    program = (
        f"import sys\nsys.argv = ['outcore', *{arguments!r}]\nfrom outcore.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout.splitlines()[-1] == "False False", shown.stderr


def test_help_and_a_wrong_option_of_any_command_import_no_torch() -> None:
    program = (
        "import sys\nfrom outcore.cli.main import COMMANDS, main\n"
        "for name in COMMANDS:\n    for word in ('--help', '--hepl'):\n        sys.argv = ['outcore', name, word]\n"
        "        try:\n            main()\n        except SystemExit as left:\n"
        "            print(name, left.code or 0, 'torch' in sys.modules, file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = [line for line in shown.stderr.splitlines() if line.split()[0] in COMMANDS]
    assert lines == [f"{name} {code} False" for name in COMMANDS for code in (0, 2)], shown.stderr


def test_help_names_the_schedules_and_norms_there_are() -> None:
    shown = " ".join(re.sub("[│]", " ", outcore_command("plan", "--help").stdout).split())
    assert f"One of {', '.join(SCHEDULES)}." in shown
    assert f"What batch norms see: {', '.join(get_args(BatchNorm))} (the whole" in shown


@pytest.mark.parametrize(
    ("typed_word", "said"),
    [
        ("trian", "no command 'trian'; did you mean train?"),
        ("zzz", "no command 'zzz'; see outcore --help"),
        ("--verison", "no option '--verison'; did you mean --version?"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest(typed_word: str, said: str) -> None:
    shown = outcore_command(typed_word)
    assert (shown.returncode, shown.stderr, shown.stdout) == (2, f"error: {said}\n", "")


def test_a_typing_error_is_answered_before_what_draws_help_is_imported() -> None:
    program = (
        "import sys\nsys.argv = ['outcore', 'trian']\nfrom outcore.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print('rich.markdown' in sys.modules, 'pydantic' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout.splitlines()[-1] == "False False", shown.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_its_help_names_no_type(name: str) -> None:
    shown = outcore_command(name, "--help")
    assert shown.returncode == 0 and "<bool>" not in shown.stdout and "Usage: outcore" in shown.stdout
    assert COMMANDS[name]
    assert "[[" not in shown.stdout and "{" not in shown.stdout
    assert not re.search(r"<(int|str|path|list|float)", shown.stdout)
    function = getattr(importlib.import_module(f"outcore.cli.{_FILES.get(name, name)}"), name)
    hints = get_type_hints(function, include_extras=True)
    assert all(hint.__metadata__[0].help for argument, hint in hints.items() if argument != "return")


@pytest.mark.parametrize("columns", [30, 40, 60, 79, 80, 120])
def test_help_cuts_nothing_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in COMMANDS:
        shown = outcore_command(name, "--help")
        function = getattr(importlib.import_module(f"outcore.cli.{_FILES.get(name, name)}"), name)
        hints = get_type_hints(function, include_extras=True)
        stated = [hint.__metadata__[0].param_decls or () for argument, hint in hints.items() if argument != "return"]
        options = [word for words in stated for joined in words for word in joined.split("/") if word.startswith("-")]
        assert shown.returncode == 0 and [word for word in options if word not in shown.stdout] == []
        assert not re.search(r"\w…", shown.stdout), name
    listed = outcore_command("--help").stdout
    assert "…" not in listed and not re.search(r"\w\.\.\.$", listed, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "job.py", "--lr", "fast"], "Invalid value for '--lr': fast was given; it must be a number"),
        (["train", "job.py", "--epochs", "1.5"], "1.5 was given; it must be a whole number of at least 1"),
        (["profile", "job.py", "--depth", "0"], "0 was given; it must be a whole number of at least 1"),
        (["infer", "job.py", "--data", "x", "--workers", "99"], "99 was given; it must be a whole number from 0 to 64"),
        (["whatif", "job.py", "--seconds", "x"], "x was given; it must be a number of at least 0.1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_number_that_is_none_is_answered_with_what_was_given_and_needed(words: list[str], said: str) -> None:
    shown = outcore_command(*words)
    assert shown.returncode == 2 and said in " ".join(re.sub("[│╭╮╰╯─]", " ", shown.stderr).split())
    assert "Input should" not in shown.stderr


def test_messages_are_in_the_words_of_the_command_line() -> None:
    for said, wanted in (
        ('give memory="3MiB" or more', "give --memory 3MiB or more"),
        ("at least 2.1 MiB (memory_bytes=2202010)", "at least 2.1 MiB (--memory 2202010)"),
        ("with statistics=True it fits", "with plan.statistics=true (of outcore train) it fits"),
        ("use batch_norm deferred", "use plan.batch_norm=deferred"),
    ):
        assert typed(said) == wanted


def test_a_budget_that_is_too_small_names_the_option() -> None:
    network = ["outcore.models:LeNet", "-i", "4x3x32x32", "--machine", "v100x2"]
    shown = outcore_command("plan", *network, "--memory", "1KiB")
    assert shown.returncode == 1 and "--memory" in shown.stderr and "memory_bytes=" not in shown.stderr


@pytest.mark.parametrize("command", ["graph", "profile", "plan"])
def test_ctrl_c_is_one_word_and_code_130(tmp_path: Path, command: str) -> None:
    model = "import os, signal\n\ndef model():\n    os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "job.py").write_text(f"{model}\ndef batch(size):\n    return None, None\n")
    shown = outcore_command(command, "job.py", folder=tmp_path)
    assert shown.returncode == 130 and shown.stderr.split("\n")[-2] == "interrupted"
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["infer", "job.py", "--data", "empty"], "empty holds no slides"),
        *(
            ([command, "job.py", "--memory", "much"], "'much' is not a size")
            for command in ("explore", "plan", "train", "verify")
        ),
        (["train", "job.py", "plan.memory=x%"], "'x%' is no share; write for example 50%"),
        (["explore", "job.py", "--on", "h900"], "unknown GPU 'h900'; did you mean h200"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_before_anything_begins(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shown = outcore_command(*words, folder=tmp_path)
    assert shown.returncode == 1 and said in shown.stderr and len(shown.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("plan", "job.py", "--memory", "3MiB", "-o", "none/p.json"),
            "no folder none for p.json; make it first: mkdir",
        ),
        (("graph", "job.py", "--svg", "here"), "here is a folder; give the name of a file: here/NAME"),
        (("explore", "job.py", "--no-open"), "no file job.py; write one with these two functions"),
    ],
)
def test_what_cannot_be_written_or_read_is_said_before_any_work(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    shown = outcore_command(*arguments, folder=tmp_path)
    assert shown.returncode == 1 and said in shown.stderr and not shown.stdout


@pytest.mark.parametrize("words", [("train", "job.py", "--out"), ("sweep", "job.py", "-o"), ("demo", "-o")])
def test_a_folder_that_takes_no_files_is_said_before_any_work(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write wherever it likes
    shown = outcore_command(*words, "there/run", folder=tmp_path)
    assert shown.returncode == 1 and not shown.stdout
    assert f"there/run cannot be written: {tmp_path} takes no files of yours; name another place: --" in shown.stderr


def test_what_the_system_refuses_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "runs")

    monkeypatch.setattr("outcore.job.Job.load", refuse)
    shown = outcore_command("graph", "job.py", folder=tmp_path)
    said = "error: runs: Read-only file system; name a place that takes it: --out or -o\n"
    assert (shown.returncode, shown.stderr) == (1, said)


def test_an_interruption_is_said_once() -> None:
    def left(*, said: bool) -> BaseException:
        try:
            try:
                try:
                    raise KeyboardInterrupt
                except KeyboardInterrupt as came:
                    raise RuntimeError from None if said else came
            except RuntimeError:
                sys.exit(130)
        except SystemExit as leaving:
            return leaving

    assert _is_interruption(left(said=False)) and not _is_interruption(left(said=True))


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (KeyboardInterrupt(), 130, ["interrupted"]),
        (OSError(errno.ENOSPC, "No space left on device"), 1,
         ["error: what was to be written: No space left on device; name a place that takes it: --out or -o"]),
        (OSError(errno.ENOENT, "No such file or directory", "a.yaml"), 1, ["error: a.yaml: No such file or directory"]),
        (type("SafetensorError", (Exception,), {})("I/O: No space left (os error 28)"), 1,
         ["error: weights cannot be written: No space left (os error 28)"]),
        (OutcoreError("no such layer"), 1, ["error: no such layer"]),
    ],
)  # fmt: skip
def test_every_end_has_its_code_and_one_line(
    error: BaseException, code: int, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("outcore.job.Job.load", refuse)
    shown = outcore_command("graph", "job.py", folder=tmp_path)
    assert (shown.returncode, shown.stderr.splitlines(), shown.stdout) == (code, lines, "")


def test_an_error_of_the_job_is_shown_with_the_job_s_own_frames(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("def model():\n    return {}['weights']\n\ndef batch(size):\n    return size\n")
    shown = outcore_command("graph", "job.py", folder=tmp_path)
    assert shown.returncode == 1 and "KeyError" in shown.stderr and "job.py" in shown.stderr
    assert "typer" not in shown.stderr and "click" not in shown.stderr


def test_editors_are_served_or_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[int] = []
    server = SimpleNamespace(start_io=lambda: served.append(1))
    monkeypatch.setattr("outcore.explore.language_server.language_server", lambda: server)
    assert outcore_command("lsp").returncode == 0 and served == [1]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    shown = outcore_command("lsp")
    assert shown.returncode == 1 and "pip install 'outcore[ui]'" in shown.stderr and served == [1]
