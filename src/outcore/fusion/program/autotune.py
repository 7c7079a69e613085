"""Which way of running is fastest here: measured, not assumed.

Fused operations win where kernels are small matrix products, and lose to one CUDA graph per member on its own stream
where they are convolutions that a grouped form runs badly. So both are tried on copies of a few members, for a
fraction of a second each, with nothing of the array touched. From the times for two and for four members follows the
time for all of them. A GPU is not filled by so few, and a line through two and four was off by a third where kernels
overlap; so there the ways that lead with four are tried again with as many as will run at once, each convolution of
fused ones in its faster form: what is timed is what will run. More than sixteen members are fused in equal groups of up
to sixteen, one after the other: on an H200 thirty-two in one group were no faster, and took more memory. The speed-up
over training one after the other is printed before training starts; what was achieved can be printed beside it.

Convolutions are measured one by one, too: grouped, unfolded, or a plain one for each member. How fast a grouped
convolution is depends on shapes in ways that are hard to predict; for some it is slower than as many plain ones. So the
convolutions of one replay are collected, each shape is timed in all ways, forward and backward, on made-up numbers, and
`outcore.fusion.rules.convolution.way` answers by what was found.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outcore.errors import FuseError
from outcore.fusion.member import independent_copy
from outcore.fusion.memory_forecast import Forecast, forecast
from outcore.fusion.program.values import Stacked
from outcore.fusion.rules import convolution
from outcore.fusion.runner import RunMode
from outcore.machine.clock import synchronize, time_calls

if TYPE_CHECKING:
    from outcore.fusion.array import FusedArray

_PROBES = (2, 4)
_WIDEST = 16
"""Members of a fused group on a GPU, at most."""
_STREAMS = 32
"""Streams that torch has; more groups share them."""
_CLOSE = 1.5
"""A way that looks at most so many times slower than the best is tried again."""


@dataclass(frozen=True, slots=True)
class TimedWay:
    """One way, tried."""

    way: RunMode
    times_s: dict[int, float]
    """Seconds per step by the number of members that were tried."""
    predicted_s: float
    """Seconds per step of all members."""


@dataclass(frozen=True)
class AutotuneResult:
    """What was tried and what was chosen."""

    members: int
    serial_s: float
    """Seconds of a step of one member in plain PyTorch."""
    trials: tuple[TimedWay, ...]
    memory: Forecast | None

    @property
    def best(self) -> TimedWay:
        """The fastest."""
        return min(self.trials, key=lambda t: t.predicted_s)

    @property
    def way(self) -> RunMode:
        """The fastest, or one after the other where nothing is faster than that."""
        return self.best.way if self.speedup > 1 else RunMode(1, channels_last=self.best.way.channels_last)

    @property
    def speedup(self) -> float:
        """Predicted, over plain PyTorch one member after the other."""
        return self.members * self.serial_s / self.best.predicted_s

    def __str__(self) -> str:
        lines = [
            f"{t.way}: {t.predicted_s * 1e3:,.2f} ms a step, {self.members * self.serial_s / t.predicted_s:.2f}x"
            for t in sorted(self.trials, key=lambda t: t.predicted_s)
        ]
        head = f"{self.members} members one after the other: {self.members * self.serial_s * 1e3:,.2f} ms a step"
        memory = [f"memory: {self.memory}"] if self.memory is not None else []
        verdict = [] if self.speedup > 1 else ["fusing does not pay here: members run one after the other"]
        return "\n".join([head, *lines, *memory, *verdict])


def choose(
    array: FusedArray,
    *batch: Any,
    each: Sequence[tuple[Any, ...]] | None = None,
    memory_bytes: int | None = None,
    ways: Sequence[RunMode] | None = None,
    seconds: float = 0.2,
) -> AutotuneResult:
    """Try the ways to run an array on copies of some members, and let it run by the fastest.

    Args:
        array: the array; neither its weights nor its optimizers change.
        batch: a typical batch, as for ``array.step``.
        each: one per member instead.
        memory_bytes: what the array may use; on a GPU what is free, by default.
        ways: those to try; by default fused and by streams, with each memory format that makes a difference.
        seconds: how long to time each.
    """
    predicted = _forecast(array, batch, each)
    limit = memory_bytes if memory_bytes is not None else _free(array.device)
    at_once = len(array) if predicted is None or limit is None else predicted.at_once(limit)
    candidates = list(ways) if ways is not None else _candidates(array, at_once)
    serial_s = _time_serially(array, batch, each, seconds)
    group, streams = group_width(len(array), min(_WIDEST, at_once)), min(len(array), at_once, _STREAMS)
    group, streams = (_affordable(count, predicted, limit) for count in (group, streams))
    again = _tries_again(array.device) and min(group, streams) > _PROBES[-1]

    def tried(way: RunMode, counts: Iterable[int], before: TimedWay | None = None) -> TimedWay:
        times = dict(before.times_s) if before is not None else {}
        for n in counts:
            times[n] = _time(array, n, way, batch, each, seconds, before is not None)
        return TimedWay(way, times, _extrapolated(times, len(array), way, at_once))

    few = sorted({min(n, len(array)) for n in (_PROBES[-1:] if again else _PROBES)})
    trials = [tried(way, few) for way in candidates]
    if again:
        near = _CLOSE * min(t.predicted_s for t in trials)
        trials = [
            t if t.predicted_s > near else tried(t.way, [group if t.way.width > 1 else streams], t) for t in trials
        ]
    # Plain steps are bound by the host, which is slower in a process that has only begun.
    serial_s = min(serial_s, _time_serially(array, batch, each, seconds))
    made = AutotuneResult(len(array), serial_s, tuple(trials), predicted)
    array.arrange(made.way)
    if made.way.width < len(array):
        made = replace(made, memory=_forecast(array, batch, each))
    if array.device.type == "cuda" and 1 < made.way.width != group and each is None:
        measure_convolutions(array, *batch)
    return made


def _forecast(array: FusedArray, batch: tuple[Any, ...], each: Any) -> Forecast | None:
    try:
        return forecast(array, *batch, each=each)
    except FuseError:
        raise
    except Exception:  # a model whose memory cannot be predicted can still be trained
        return None


def _affordable(count: int, predicted: Forecast | None, limit: int | None) -> int:
    """The largest number of members, up to `count`, with which the best ways can be tried again beside the array
    itself."""
    while count > 1 and predicted is not None and limit is not None and predicted.peak_bytes(count) > limit:
        count //= 2
    return count


def _tries_again(device: torch.device) -> bool:
    return device.type == "cuda"  # a CPU is full with a few


def _free(device: torch.device) -> int | None:
    return int(torch.cuda.mem_get_info(device)[0] * 0.9) if device.type == "cuda" else None


def _candidates(array: FusedArray, at_once: int) -> list[RunMode]:
    on_gpu = array.device.type == "cuda"
    formats = {array.way.channels_last}
    if on_gpu and any(p.dim() == 4 and max(p.shape[2:]) > 1 for p in array.models[0].parameters()):
        formats = {False, True}
    found = []
    width = group_width(len(array), min(_WIDEST, at_once)) if on_gpu else at_once
    for channels_last in sorted(formats):
        found.append(RunMode(width, on_gpu, channels_last=channels_last))
        together = on_gpu and at_once == len(array)
        found.append(RunMode(1, on_gpu, together, channels_last=channels_last))
    return found


def group_width(members: int, most: int = _WIDEST) -> int:
    """How many members to fuse in a group, so that groups of at most `most` are about equal."""
    groups = -(-members // most)
    return -(-members // groups)


def _extrapolated(times: dict[int, float], members: int, way: RunMode, at_once: int) -> float:
    """A line through the two largest counts that were tried, or through the origin; groups one after the other add
    up."""
    if members in times and at_once >= members:
        return times[members]
    if 1 < way.width < members and way.width in times:
        return -(-members // way.width) * times[way.width]
    if len(times) == 1:
        ((count, found),) = times.items()
        return found * max(1.0, members / count)
    (few, short), (more, long) = sorted(times.items())[-2:]

    def line(count: int) -> float:
        return max(long * count / more * 0.25, short + (long - short) * (count - few) / (more - few))

    if 1 < way.width < members:
        return -(-members // way.width) * line(way.width)
    return line(members)


def _copy(array: FusedArray, count: int, way: RunMode) -> FusedArray:
    from outcore.fusion.array import FusedArray

    models = [independent_copy(model) for model in array.models[:count]]
    width = 1 if way.width == 1 else min(count, way.width)
    made = FusedArray(
        models, array.kind, array.terms, way=replace(way, width=width), check=False, unfused=array.unfused
    )
    made.share_recordings(array)
    return made


def _time(
    array: FusedArray,
    count: int,
    way: RunMode,
    batch: tuple[Any, ...],
    each: Any,
    seconds: float,
    layers: bool = False,
) -> float:
    """Seconds of a step of copies of some members; with `layers`, each convolution of fused ones in its faster form."""
    tried = _copy(array, count, way)
    share = None if each is None else each[:count]
    if layers and each is None and tried.way.width > 1:
        measure_convolutions(tried, *batch)
    found = time_steps(lambda: tried.step(*batch, each=share), array.device, seconds, warm=4)
    if array.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _time_serially(array: FusedArray, batch: tuple[Any, ...], each: Any, seconds: float) -> float:
    """Seconds of a step of one member in plain PyTorch."""
    model = independent_copy(array.models[0])
    slot = array.kind.slot(model, 0)
    args = array.arguments(batch, each)
    from outcore.fusion.program.values import member_of

    own = member_of(args, 0)
    group = array.groups[0]

    def step() -> None:
        for name, training in slot.trainings.items():
            optimizer = slot.optimizers[name]
            optimizer.zero_grad()
            with group.autocast():
                loss = training(*own)[0]
            loss.backward()
            optimizer.step()

    # It is bound by the host, which anything else on the machine slows, and nothing makes faster.
    return time_steps(step, array.device, seconds, warm=3, fastest=True)


def time_steps(
    step: Callable[[], Any], device: torch.device, seconds: float, *, warm: int, fastest: bool = False
) -> float:
    """Seconds per call, the median or the fastest of several rounds, after some calls that are not counted."""
    for _ in range(warm if device.type == "cuda" else 1):
        step()
    synchronize(device)
    begun = time.perf_counter()
    step()
    synchronize(device)
    calls = 5 if (time.perf_counter() - begun) < seconds / 10 else 1
    rounds: list[float] = []
    begun = time.perf_counter()
    while len(rounds) < 2 or (time.perf_counter() - begun < seconds and len(rounds) < 40):
        start = time.perf_counter()
        for _ in range(calls):
            step()
        synchronize(device)
        rounds.append((time.perf_counter() - start) / calls)
    return min(rounds) if fastest else statistics.median(rounds)


def measure_convolutions(array: FusedArray, *batch: Any, seconds: float = 0.01) -> dict[str, int]:
    """Decide for each convolution of an array; returns how many shapes run which way."""
    group = array.groups[0]
    args = array.arguments(batch, None)
    seen: dict[Any, tuple[convolution.MemberConvolution, Tensor, Tensor]] = {}
    with torch.no_grad(), convolution.collecting(seen):
        for name in array.slots[0].trainings:
            _, program = array.program(name, args)
            if program.obstacle is None and len(group) > 1:
                kept = {n: t.clone() for n, t in group.stack.buffers.items()}
                group.forward(name, program, args, own_model=False)
                for buffer, content in kept.items():
                    group.stack.buffers[buffer].copy_(content)
    found: dict[str, int] = {}
    for signature, (conv, x, weight) in seen.items():
        best = min(conv.ways(x, weight), key=lambda way: _convolution_s(conv, x, weight, way, group.device, seconds))
        convolution.decide(signature, best)
        found[best] = found.get(best, 0) + 1
    return found


def _convolution_s(
    conv: convolution.MemberConvolution, x: Tensor, weight: Tensor, way: str, device: torch.device, seconds: float
) -> float:
    given = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).normal_().requires_grad_()
    own = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=device).normal_()
    own.requires_grad_()

    def both() -> None:
        conv.stacked(way, Stacked(given), own, None).tensor.sum().backward()
        given.grad = own.grad = None

    return time_calls(both, device, seconds=seconds, warmup=2, most=10).median_s
