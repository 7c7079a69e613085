"""Numbers of GPUs and what each gives, with an interval; and what that says, in sentences.

The step of several ranks is predicted from that of one. How far it may be off beyond what is said of one is known from
ranks that were really joined by links (`benchmarks/whatif-links`), by the way they train: between a low and a high
share of the prediction eight in ten of the steps lie that were measured there. A number of GPUs *helps* if it trains
faster than every smaller one wherever in its interval it lies, and does not if nowhere in it; else it is too close to
say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from outcore.errors import WhatIfError
from outcore.machine import format_bytes, format_time

__all__ = ["LEAST_GAIN", "STRATEGIES", "WOVEN", "ScalingPoint", "ScalingTable", "Strategy", "helps"]

Strategy = Literal["data_parallel", "sharded", "gpipe", "1f1b", "gems"]
STRATEGIES: tuple[Strategy, ...] = ("data_parallel", "sharded", "gpipe", "1f1b", "gems")
WOVEN: tuple[Strategy, ...] = ("data_parallel", "sharded")
"""Those in which every rank runs the recorded step, with collectives woven into it."""
_FULL = 0.8
LEAST_GAIN = 0.05
"""A GPU more helps if samples per second grow by more than a twentieth of what one brings."""
_PIPELINE = (0.94, 1.42)
SHARES: dict[str, tuple[float, float]] = {
    "data_parallel": (0.94, 1.08),
    "sharded": (1.0, 1.24),
    "gpipe": _PIPELINE,
    "1f1b": _PIPELINE,
    "gems": _PIPELINE,
}
"""Between these, times the predicted step, lie eight in ten of the steps that were measured over real links."""


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One number of GPUs, used in one way."""

    gpus: int
    strategy: str
    batch: int
    """Samples of a step over all GPUs."""
    step_s: float
    samples_per_s: float
    efficiency: float
    compute_s: float
    """Work of the device in a step."""
    communication_s: float
    """What the link does in a step, hidden or not."""
    exposed_s: float
    """What of it the device waits for; of a pipeline, what stages wait for each other and for messages."""
    said: str = ""

    @property
    def interval_s(self) -> tuple[float, float]:
        """Between these its step lies in four cases of five, where that of one GPU takes what is said."""
        low, high = SHARES[self.strategy] if self.gpus > 1 else (1.0, 1.0)
        return self.step_s * low, self.step_s * high

    @property
    def waits(self) -> bool:
        """Whether more than a twentieth of the step is spent waiting."""
        return self.gpus > 1 and self.exposed_s > 0.05 * self.step_s

    def helps(self, before: ScalingPoint) -> bool | None:
        """Whether it trains faster than fewer GPUs do; None where that is too close to say."""
        low_s, high_s = self.interval_s
        slowest, fastest = (self.batch / step_s / before.samples_per_s for step_s in (high_s, low_s))
        return helps(self.gpus / before.gpus, slowest, fastest)


@dataclass(frozen=True)
class ScalingTable:
    """Numbers of GPUs, and what each gives."""

    job: str
    device: str
    link: str
    mode: Literal["weak", "strong"]
    points: tuple[ScalingPoint, ...]
    refused: tuple[str, ...]
    """Ways that cannot be used, each with the reason."""
    weight_bytes: int
    largest_block: tuple[str, int]
    """The block with the most weights, and their bytes."""
    hidden_from: int | None = None
    """The batch of a GPU from which on the first all-reduce that is waited for would be hidden; None if not found."""
    launch_s: float | None = None
    """What the host of one GPU takes to issue a step, where that and not the GPU's work sets the pace."""

    def of(self, strategy: str) -> list[ScalingPoint]:
        """The points of one way, by the number of GPUs."""
        return sorted((p for p in self.points if p.strategy == strategy), key=lambda p: p.gpus)

    def best(self, gpus: int) -> ScalingPoint:
        """The fastest way to use so many."""
        found = [p for p in self.points if p.gpus == gpus]
        if not found:
            raise WhatIfError(f"{gpus} GPUs were not asked for; known are {sorted({p.gpus for p in self.points})}")
        return _fastest(found)

    def helps(self, strategy: str = "data_parallel") -> dict[int, bool | None]:
        """By number of GPUs: whether they train faster than every smaller number that was asked for; None where that is
        too close to say."""
        points = self.of(strategy)
        return {p.gpus: p.helps(_fastest(points[:n])) for n, p in enumerate(points) if n}

    def verdict(self, strategy: str | None = None) -> str:
        """A few sentences on one way, or on the first that was asked for and on which of all is the fastest: up to how
        many GPUs it pays, what stops it, and what would help."""
        way = strategy if strategy is not None else self.points[0].strategy
        points = self.of(way)
        if len(points) < 2:
            said = "One number of GPUs says nothing of scaling; ask for several."
        elif way in WOVEN:
            said = self._collectives_said(way, points)
        else:
            said = self._stages_said(way, points)
        if self.launch_s is not None and points:
            work = format_time(points[0].compute_s)
            said += (
                f" On one GPU the host sets the pace: it issues calls for {format_time(self.launch_s)}, "
                f"the GPU works {work} of it; a larger batch or CUDA graphs would fill the GPU."
            )
        return said if strategy is not None else f"{said}{self._fastest_said()}"

    def _collectives_said(self, way: str, points: Sequence[ScalingPoint]) -> str:
        """On ranks that all hold the network, or shares of its weights."""
        name, nbytes = self.largest_block
        if way == "data_parallel":
            what, verb = f"the all-reduce of {format_bytes(self.weight_bytes)} of gradients", "is"
        else:
            what, verb = f"the gathers and scatters of {format_bytes(self.weight_bytes)} of weights", "are"
        if nbytes > 0.5 * self.weight_bytes:
            what += f" ({format_bytes(nbytes)} of them in {name})"
        first = next((p for p in points if p.waits), None)
        if first is None:
            last = points[-1]
            said = f"up to {last.gpus} GPUs over {self.link} {what} {verb} hidden"
            if last.efficiency >= _FULL:
                return f"{said}: {last.efficiency:.0%} efficiency."
            each = last.batch // last.gpus
            return f"{said}, but {each} samples do not fill a GPU: {last.efficiency:.0%} efficiency."
        upto = max((p.gpus for p in points if p.gpus < first.gpus and not p.waits), default=1)
        said = f"beyond {upto} GPU{'s' if upto > 1 else ''} over {self.link} {what} {verb} no longer hidden: "
        said += f"{first.gpus} wait {format_time(first.exposed_s)} of {format_time(first.step_s)}{_help_said(points)}"
        if way == "data_parallel" and self.hidden_from is not None:
            said += f". With a batch of {self.hidden_from} on each GPU it would be hidden"
        return f"{said}."

    def _stages_said(self, way: str, points: Sequence[ScalingPoint]) -> str:
        """On ranks that hold stages."""
        last = points[-1]
        waits = f"{format_time(last.exposed_s)} of {format_time(last.step_s)}"
        said = f"{way} over {self.link}: stages on {last.gpus} GPUs wait {waits} for each other and for messages"
        return f"{said}{_help_said(points)}."

    def _fastest_said(self) -> str:
        """Which of several ways is the fastest on most GPUs."""
        most = max(p.gpus for p in self.points)
        first, *others = sorted((p for p in self.points if p.gpus == most), key=lambda p: p.step_s / p.batch)
        if most == 1 or not others:
            return ""
        least = first.batch / first.interval_s[1]
        near = [p.strategy for p in others if p.batch / p.interval_s[0] > least]
        said = f" On {most} GPUs {first.strategy} is the fastest of these, {first.samples_per_s:,.1f} samples/s"
        return f"{said}; {' and '.join(near)} may be as fast." if near else f"{said}."

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "job": self.job,
            "device": self.device,
            "link": self.link,
            "mode": self.mode,
            "weight_bytes": self.weight_bytes,
            "points": [asdict(point) | {"interval_s": list(point.interval_s)} for point in self.points],
            "helps": {way: self.helps(way) for way in dict.fromkeys(p.strategy for p in self.points)},
            "refused": list(self.refused),
            "verdict": self.verdict(),
        }


def helps(more: float, slowest: float, fastest: float) -> bool | None:
    """Whether so many times as many GPUs help, that train between so many times the samples per second; None where that
    is too close to say.

    >>> helps(2, 1.5, 1.8), helps(2, 0.8, 1.0), helps(2, 0.9, 1.2)
    (True, False, None)
    """
    least = 1 + LEAST_GAIN * (more - 1)
    return True if slowest > least else False if fastest <= least else None


def _fastest(points: Sequence[ScalingPoint]) -> ScalingPoint:
    return max(points, key=lambda p: p.samples_per_s)


def _help_said(points: Sequence[ScalingPoint]) -> str:
    """From which number of GPUs on another one does not help, or that each does."""
    for number, after in enumerate(points[1:], 1):
        before = _fastest(points[:number])
        good = after.helps(before)
        if good is None:
            return f"; whether {after.gpus} GPUs train faster than {before.gpus} is too close to say"
        if not good:
            word = "no faster" if after.samples_per_s >= 0.98 * before.samples_per_s else "slower"
            return f"; {after.gpus} GPUs train {word} than {before.gpus}"
    return f"; each GPU more still helps, at {points[-1].efficiency:.0%} efficiency with {points[-1].gpus}"
