"""The secret of a run: who knows it may join, nobody else.

A launcher of outcore's own makes one for each run and gives it to its ranks in their environment, which only their user
can read. Ranks that something else started (torchrun, SLURM, mpirun) look for ``OUTCORE_SECRET`` too; where it is not
set they use a file of the user's own, made with the first run, which clusters share between hosts with the home
directory.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from outcore.errors import EngineError
from outcore.run.ranks.store import new_secret

__all__ = ["VARIABLE", "find_secret"]

VARIABLE = "OUTCORE_SECRET"


def find_secret() -> str:
    """The secret of the run that this process belongs to."""
    if given := os.environ.get(VARIABLE):
        return given
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return _from_file(home / "outcore" / "secret")


def _from_file(path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        if not path.exists():
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(new_secret())
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)  # of several ranks that make it at once, one wins
            aside.unlink()
        mode = path.stat().st_mode
        found = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise EngineError(
            f"ranks need a secret that only they know, and {path} cannot be used ({error.strerror}); set {VARIABLE} "
            "to the same random text for all ranks"
        ) from error
    if stat.S_IMODE(mode) & 0o077 or len(found) < 16:
        raise EngineError(f"{path} is no secret (others may read it, or it is too short); remove it, or chmod 600")
    return found
