"""What a call saves for its backward: a tensor that the graph knows, or one that it made for backward alone.

Of a *derived* tensor it is known which operation below autograd made it, from what, and its type and shape. Rules ask
these fields; the sentence that they make (`Saved.what`) is for readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_CAST = "_to_copy"


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A tensor that an operation makes for its backward.

    >>> print(DerivedTensor("_to_copy", "bfloat16", (4, 3), "conv.weight"))
    bfloat16 4x3 of _to_copy of conv.weight
    """

    made_by: str
    """The operation below autograd that made it (``native_dropout``), or what a table of operations calls it."""
    dtype: str = ""
    """As torch spells it; empty where it is not known."""
    shape: tuple[int, ...] = ()
    source: str = ""
    """The value or parameter of the call that this operation read first; empty for any other."""

    @property
    def cast_of(self) -> str:
        """The value or parameter of which it is a copy in another type; empty if it is something else."""
        return self.source if self.made_by == _CAST else ""

    def __str__(self) -> str:
        if not self.dtype:
            return self.made_by
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.dtype} {shape} of {self.made_by}" + (f" of {self.source}" if self.source else "")


@dataclass(frozen=True, slots=True)
class Saved:
    """Memory that a call saves for its backward."""

    of: str
    """Name of the value (the first in that memory), of the parameter or buffer, or of the derived tensor."""
    kind: Literal["value", "parameter", "buffer", "derived"]
    bytes: int
    derived: DerivedTensor | None = None
    """For a derived tensor: what it is."""

    @property
    def what(self) -> str:
        """What a derived tensor is, in words; empty for any other."""
        return str(self.derived) if self.derived is not None else ""

    @property
    def cast_of(self) -> str:
        """The value or parameter of which it is a copy in another type; empty if it is something else."""
        return self.derived.cast_of if self.derived is not None else ""

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Saved:
        """The entry that `dataclasses.asdict` wrote."""
        known = row.get("derived")
        derived = DerivedTensor(**{**known, "shape": tuple(known.get("shape", ()))}) if known is not None else None
        return cls(row["of"], row["kind"], row["bytes"], derived)
