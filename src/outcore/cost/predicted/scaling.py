"""Time and memory of a step as functions of the batch size or of the image's.

Skyline fits a line through a few measured batch sizes. Here every size is predicted for itself, which costs a fraction
of a second, so what is not a line is seen: where the device is not yet full time hardly grows with the batch, where
another algorithm or another peak takes over the slope changes. Between the predicted sizes lines are drawn, and where
the slope changes by more than a quarter a *knee* is reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from outcore.errors import OutcoreError

_CHANGE = 0.25


@dataclass(frozen=True, slots=True)
class SizePoint:
    """One size: what a step takes."""

    size: int
    step_s: float
    low_s: float
    high_s: float
    peak_bytes: int
    samples: int
    """In a batch."""
    measured_s: float | None = None

    @property
    def per_second(self) -> float:
        """Samples per second."""
        return self.samples / self.step_s


@dataclass(frozen=True)
class Scaling:
    """Predicted steps over sizes, ascending."""

    along: Literal["batch", "image"]
    points: tuple[SizePoint, ...]
    capacity_bytes: int
    largest: int
    """The largest size whose step fits; 0 if none does."""
    failures: dict[int, str]
    """Sizes that the model does not take, each with the reason."""

    def at(self, size: int) -> SizePoint:
        """What a size takes, on the line between its neighbours."""
        if not self.points or not self.points[0].size <= size <= self.points[-1].size:
            known = f"{self.points[0].size} to {self.points[-1].size}" if self.points else "none"
            raise OutcoreError(f"size {size} lies outside of the sizes that were predicted, {known}")
        for a, b in itertools.pairwise(self.points):
            if size <= b.size:
                share = (size - a.size) / (b.size - a.size)
                return _between(a, b, share, size)
        return self.points[0]

    def knees(self, of: Literal["step_s", "peak_bytes"] = "step_s") -> list[int]:
        """Sizes at which the slope changes by more than a quarter: by the batch per sample, by the image per pixel."""
        points = self._apart()
        scale = [p.size if self.along == "batch" else p.size**2 for p in points]
        values = [float(getattr(p, of)) for p in points]
        slopes = [
            (v2 - v1) / (s2 - s1)
            for (s1, v1), (s2, v2) in itertools.pairwise(zip(scale, values, strict=True))
        ]  # fmt: skip
        found: list[int] = []
        last, largest = -2, 0.0
        for i, (before, after) in enumerate(itertools.pairwise(slopes), 1):
            change = abs(after - before) / (max(abs(before), abs(after)) or 1.0)
            if change <= _CHANGE:
                continue
            if last == i - 1 and found:  # one bend between two sizes changes the slope at both: it is at the larger
                if change > largest:
                    found[-1] = points[i].size
            else:
                found.append(points[i].size)
            last, largest = i, max(change, largest if last == i - 1 else 0.0)
        return found

    def _apart(self) -> list[SizePoint]:
        """Sizes far enough apart that the slope between them means something."""
        found: list[SizePoint] = []
        for point in self.points:
            if not found or point.size >= 1.25 * found[-1].size:
                found.append(point)
        return found

    def best(self) -> SizePoint | None:
        """The predicted size with the most samples per second among those that fit."""
        fitting = [p for p in self.points if p.peak_bytes <= self.capacity_bytes]
        return max(fitting, key=lambda p: p.per_second, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "along": self.along,
            "points": [asdict(p) | {"per_second": p.per_second} for p in self.points],
            "capacity_bytes": self.capacity_bytes,
            "largest": self.largest,
            "knees": {"step_s": self.knees("step_s"), "peak_bytes": self.knees("peak_bytes")},
            "failures": {str(size): reason for size, reason in self.failures.items()},
        }


def ladder(
    along: Literal["batch", "image"],
    sizes: Sequence[int],
    predict: Callable[[int], SizePoint],
    capacity_bytes: int,
    *,
    most: int = 1 << 16,
) -> Scaling:
    """Predict the given sizes, and go on until the largest that fits is known.

    Args:
        along: what the sizes are.
        sizes: to be predicted in any case.
        predict: the step of one size; may raise an `OutcoreError`.
        capacity_bytes: of the device.
        most: no size beyond this one is tried.
    """
    points: dict[int, SizePoint] = {}
    failures: dict[int, str] = {}

    def fits(size: int) -> bool:
        if size not in points and size not in failures:
            try:
                points[size] = predict(size)
            except OutcoreError as error:
                failures[size] = str(error).splitlines()[0]
        return size in points and points[size].peak_bytes <= capacity_bytes

    good = [size for size in sorted(set(sizes)) if fits(size)]
    low = good[-1] if good else 0
    high = min((s for s, p in points.items() if p.peak_bytes > capacity_bytes), default=0)
    size = 2 * (low or max(sizes))
    while low and not high and size <= most and max(failures, default=0) < low:
        low, high = (size, 0) if fits(size) else (low, size)
        size *= 2
    while low and high - low > max(1, low // 64):  # exact to less than two in a hundred
        middle = _guess(points, low, high, capacity_bytes)
        low, high = (middle, high) if fits(middle) else (low, middle)
    ordered = tuple(points[s] for s in sorted(points))
    return Scaling(along, ordered, capacity_bytes, low, failures)


def _guess(points: dict[int, SizePoint], low: int, high: int, capacity: int) -> int:
    """The size at which the line between two sizes reaches the capacity, not too close to either."""
    if low in points and high in points:
        a, b = points[low].peak_bytes, points[high].peak_bytes
        middle = low + int((high - low) * (capacity - a) / max(1, b - a))
    else:
        middle = (low + high) // 2
    margin = max(1, (high - low) // 16)
    return min(high - margin, max(low + margin, middle))


def _between(a: SizePoint, b: SizePoint, share: float, size: int) -> SizePoint:
    def mix(name: str) -> float:
        return float((1 - share) * getattr(a, name) + share * getattr(b, name))

    samples = size if a.samples == a.size and b.samples == b.size else a.samples
    return SizePoint(size, mix("step_s"), mix("low_s"), mix("high_s"), round(mix("peak_bytes")), samples)
