"""The command as typed, in this process: importing torch anew for every case would take most of the time."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from outcore.cli.main import main


@dataclass(frozen=True)
class Shown:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def outcore_command(*arguments: str, folder: Path | None = None) -> Shown:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(folder or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["outcore", *arguments]),
    ):
        try:
            main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(bool(left.code))
    return Shown(code, out.getvalue(), err.getvalue())
