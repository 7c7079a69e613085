"""What a comparison with plain PyTorch found: parameter by parameter, and a grade.

The grade is the one a plan names: *bitwise*, or *reassociated* with differences below a bound that follows from the
precision, or *lossy* where it names an encoding that is, with how far the gradients are off.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from outcore.machine.units import format_bytes

__all__ = ["BOUNDS", "ParameterRow", "Verdict"]

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""By precision, over the model's largest gradient: what sums in another order may differ by."""


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter."""

    name: str
    largest: float
    """The largest difference of its gradients, over all steps."""
    relative: float
    """Over the largest gradient of the model."""


@dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    rows: tuple[ParameterRow, ...]
    buffers: int
    equal_buffers: int
    equal_losses: bool
    steps: int
    bound: float
    planned_bytes: int
    plain_bytes: int
    explained: str
    lossy: int = 0
    """Buffers that the plan holds in fewer bits than they have."""
    crop: tuple[int, int] | None = None
    """Longest side of the images that were tried, and of the whole ones, where these were too large."""
    whole_plain_bytes: int | None = None
    """With a crop: what plain training on the whole images is predicted to take; `plain_bytes` is for the crop."""
    whole_planned_bytes: int | None = None
    """With a crop: what the plan takes on the whole images, where it was made for them here."""
    ranks: int = 1
    """That the plan was run on; of several, `planned_bytes` is what the largest is predicted to hold."""

    @property
    def peaks(self) -> str:
        """What the plan and plain training are predicted to take, and for which images that is."""
        if self.ranks > 1:
            shown = (self.planned_bytes, "the largest rank {}"), (self.plain_bytes, "plain {}")
            known = [text.format(format_bytes(nbytes)) for nbytes, text in shown if nbytes]
            return f"{', '.join(known)} (predicted)" if known else "the plan says nothing of memory"
        tried = f"{format_bytes(self.planned_bytes)} against {format_bytes(self.plain_bytes)} plain"
        if self.crop is None or self.whole_plain_bytes is None:
            return f"plan {tried} (predicted)"
        plain = f"{format_bytes(self.whole_plain_bytes)} plain"
        planned = self.whole_planned_bytes
        whole = f"plan {format_bytes(planned)} against {plain}" if planned is not None else plain
        return f"whole images: {whole}; the crop: {tried} (predicted)"

    @property
    def grade(self) -> str:
        """Bitwise, reassociated, lossy as the plan says, or different."""
        if all(r.largest == 0 for r in self.rows) and self.equal_losses and self.equal_buffers == self.buffers:
            return "bitwise equal"
        if all(r.relative <= self.bound for r in self.rows):
            return f"equal within {self.bound:g} of the largest gradient (re-associated sums)"
        if self.lossy:
            worst = max(r.relative for r in self.rows)
            return f"lossy, as the plan says: off by at most {worst:.3g} of the largest gradient"
        return "different"

    @property
    def agrees(self) -> bool:
        """Whether the plan may be trusted."""
        return self.grade != "different"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "grade": self.grade, "agrees": self.agrees}
