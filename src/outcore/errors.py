"""The errors outcore raises.

One base class, so that a caller can catch all of them; each subclass also inherits the builtin that fits, so that code
which knows nothing of outcore still handles them well. A message says what was given, what was needed, and what to
type next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class OutcoreError(Exception):
    """Base of everything outcore raises on purpose."""


class JobError(OutcoreError, ValueError):
    """A job (file, class or functions) cannot be used as given."""


class CaptureError(OutcoreError, RuntimeError):
    """A model cannot be recorded; names the block and the source line."""


class VaryingError(OutcoreError, RuntimeError):
    """A recording cannot stand for a model whose Python does something else in every call; names what changes."""

    what: str = ""
    """What changes, as it is called in a sentence."""


class FuseError(OutcoreError, ValueError):
    """Models cannot be trained as one as given; names the member, the parameter or the setting."""


class MachineError(OutcoreError, ValueError):
    """A machine, device or calibration is not known, not complete or not readable."""


class ModelError(OutcoreError, ValueError):
    """A model of the collection cannot be built, or cannot take this input; says what it can."""


class ScanError(OutcoreError, ValueError):
    """A recurrence or chain cannot be scanned as given; says what was given and what would work."""


class PlanError(OutcoreError, ValueError):
    """A network cannot be planned as asked, or a plan does not fit its network; names the block or the figure."""

    least_bytes: int | None = None
    """The smallest budget that would do, where it is known."""
    least_policy: Mapping[str, Any] | None = None
    """The policies with which it would."""
    further_passes: str = ""
    """What it would take where further passes over an image are accepted, as a part of a sentence; empty if more."""


class ProgramError(OutcoreError, ValueError):
    """A program, schedule or set of stages breaks a rule; names the rank, the instruction and the reason."""


class DataError(OutcoreError, ValueError):
    """A slide, volume or table cannot be read as given; names the file, and the tile or row."""


class MissingPackageError(DataError):
    """A file cannot be read because a package is not installed; the file is not to blame."""


class FullDiskError(DataError):
    """There is no room left for what is being written."""


class EngineError(OutcoreError, RuntimeError):
    """A run cannot begin or go on; names the rank, the stage, the block and the cause."""


class CheckpointError(OutcoreError, OSError):
    """A checkpoint cannot be written or read; the last good one is kept."""


class StreamError(OutcoreError, ValueError):
    """A network cannot be streamed as asked; names the block, the reason and what would work."""


class ConfigError(OutcoreError, ValueError):
    """A setting of a training run has a name or a value that is not known; names the nearest that is."""


class TrainError(OutcoreError, RuntimeError):
    """A training run cannot go on; says at which step and example, and what to change."""


class WhatIfError(OutcoreError, ValueError):
    """A question cannot be asked as given: names the block, technique, GPU or link, and those that are known."""


def suggest(name: str, known: Iterable[str], *, prefix: str = "", shown: int = 12) -> str:
    """What to type instead of a name that is not known: the nearest ones, or else the first of all.

    >>> suggest("depht", ["depth", "width"], prefix="net.")
    'did you mean net.depth?'
    >>> suggest("colour", ["depth", "width"], shown=1)
    'known are depth and 1 more'
    """
    names = [name for name in dict.fromkeys(known) if name]  # the whole of something has no name to type
    if not names:
        return "none is known"
    if near := difflib.get_close_matches(name, names, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(prefix + n for n in near)}?"
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"known are {', '.join(prefix + n for n in names[:shown])}{more}"
