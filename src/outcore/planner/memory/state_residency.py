"""What of the state is on the device at every moment of a step, where some of it lives below the device.

Played through by the rules by which it runs (`outcore.planner.memory.buckets`): buckets of parameters come when a call
reads them and make room for others; in backward a bucket leaves when its gradients are complete, and these are gathered
into one piece and follow; in the optimizer's step, one bucket after the other, parameters, gradients and state come,
are updated and leave.

    forward     buckets in use and coming, at most a stage
    backward    the same; gradients of the buckets that are not complete, gathered ones that are being copied home
    optimizer   of one bucket everything, of the next the state, of the one before what is still being copied home

Copies home take time that depends on the link, so what leaves is counted until something else leaves after it: that is
when it is waited for at the latest.

`StateSavings` is what a policy for parameters, gradients and optimizer state changes in a step: memory at every moment,
and time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outcore.cost.costs import Costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.step_memory import MemoryCurve
from outcore.planner.memory.buckets import (
    OffloadableParams,
    most_of,
    rounded,
    that_follows,
    that_leave,
)
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.state_policy import StatePolicy


def change_by_moment(
    policy: StatePolicy, offloadable: OffloadableParams, plain: MemoryCurve, costs: Costs, optimizer: OptimizerCost
) -> npt.NDArray[np.int64]:
    """Bytes more (less, if negative) at every moment of the plain step."""
    return _Play(policy, offloadable, plain, costs, optimizer).run()


class _Play:
    """Goes through the moments of a plain step and counts which parameters, gradients and state are elsewhere."""

    def __init__(
        self,
        policy: StatePolicy,
        offloadable: OffloadableParams,
        plain: MemoryCurve,
        costs: Costs,
        optimizer: OptimizerCost,
    ) -> None:
        self.policy, self.offloadable, self.plain, self.costs, self.optimizer = (
            policy,
            offloadable,
            plain,
            costs,
            optimizer,
        )
        self.buckets = offloadable.buckets(policy)
        self.sizes = [sum(rounded(item.bytes) for item in bucket) for bucket in self.buckets]
        self.of = {item.name: number for number, bucket in enumerate(self.buckets) for item in bucket}
        reached = {m.call for m in plain.moments if m.phase == "backward"}
        self.backward = [name for name in costs.calls if name in reached]
        self.stepped = {
            name: costs.parameters[name]
            for name in dict.fromkeys(g.of for call in self.backward for g in costs.calls[call].gradients)
            if name in costs.parameters
        }
        """The parameters that get a gradient."""
        self.window = _Window(self.sizes, policy.stage_bytes) if policy.stage_bytes is not None else None
        self.used_up = policy.update == "backward"
        """Gradients are gone as soon as those of a bucket are complete, because it is updated then."""
        self.leaves = policy.gradients == "offload" or self.used_up
        self.gone: set[int] = set()
        """Buckets whose gradients are at home."""

    def run(self) -> npt.NDArray[np.int64]:
        """Bytes by which each moment of the step differs from the plain one; fewer are negative."""
        held = self._of_buckets(range(len(self.buckets)))
        state = -self._state_bytes(held) if self.policy.optimizer == "offload" else 0
        parts = self._forward(), self._backward()
        changes = []
        for at, moment in enumerate(self.plain.moments):
            if moment.phase == "optimizer":
                if self.window is not None:
                    self.window.sent = 0
                changes.append(self._step(moment.bytes.gradients))
            else:
                changes.append(state + parts[moment.phase == "backward"][at])
        return np.array(changes, dtype=np.int64)

    # Forward

    def _forward(self) -> dict[int, int]:
        """For each moment of forward, the bytes of parameters that are on the device less those that are offloaded."""
        found = {}
        for at, moment in enumerate(self.plain.moments):
            if moment.phase == "forward":
                numbers = self._numbers(self.offloadable.calls.get(moment.call, ()))
                found[at] = self._come(numbers, backward=False) - self._away()
        if self.window is not None:
            self.window.pause()
        return found

    def _come(self, numbers: Sequence[int], *, backward: bool) -> int:
        """Buckets are needed; bytes of parameters that are then here."""
        if self.window is None:
            return sum(self.sizes) if self.policy.parameters == "offload" else 0
        if numbers:
            self.window.need(numbers, backward=backward)
        return self.window.bytes

    def _away(self) -> int:
        """Bytes of parameters that plain training has on the device for good."""
        there = [item for bucket in self.buckets for item in bucket] if self.policy.parameters == "offload" else []
        return sum(self._alone(item.bytes) for item in there)

    # Backward

    def _backward(self) -> dict[int, int]:
        """The same for each moment of backward, with the gradients of the parameters."""
        waiting = [{i.name for i in bucket if i.trained} for bucket in self.buckets]
        last = {
            self.offloadable.name(g.of): call
            for call in reversed(self.backward)
            for g in self.costs.calls[call].gradients
        }
        """Call with which a parameter's gradient is complete: backward goes from the last call to the first."""
        completes: dict[str, list[str]] = {}
        for name, call in last.items():
            completes.setdefault(call, []).append(name)
        ends = {moment.call: at for at, moment in enumerate(self.plain.moments) if moment.phase == "backward"}
        """Gradients that are to be added up are, before they count as arrived."""
        found: dict[int, int] = {}
        gone = leaving = 0
        for at, moment in enumerate(self.plain.moments):
            if moment.phase != "backward":
                continue
            saved = [s.of for s in self.costs.calls[moment.call].saved if s.kind == "parameter"]
            here = [self._come([number], backward=True) for number in self._numbers(saved)]
            weights = max([*here, self._at_most(waiting)]) - self._away()
            found[at] = weights - gone + leaving
            if ends[moment.call] != at:
                continue
            complete = self._complete(waiting, completes.get(moment.call, ()))
            if complete and self.leaves:  # what the call worked in is free by then, and what left before
                free = moment.bytes.workspace - self._alone(self.costs.library_bytes)
                found[at] = max(found[at], weights - gone + max(map(self._leaving, complete)) - free)
                gone += self._gradient_bytes(complete)
                leaving = 0 if self.used_up else max(self.sizes[number] for number in complete)
                self.gone.update(complete)
            if self.window is not None:
                for number in sorted(complete, key=self.sizes.__getitem__):  # the worst order
                    self.window.leave(number, sent=self.used_up)
        return found

    def _complete(self, waiting: Sequence[set[str]], names: Iterable[str]) -> list[int]:
        """The buckets whose last gradients are these."""
        found = []
        for number in self._numbers(names):
            waiting[number].difference_update(names)
            if not waiting[number]:
                found.append(number)
        return found

    def _leaving(self, number: int) -> int:
        """What the gradients of a bucket need beside them to leave: room to be gathered, or that of the update."""
        if not self.used_up:
            sizes = [rounded(item.bytes) for item in self.buckets[number]]
            alone = most_of(sizes)
            return sum(sizes) - (sizes[alone] if alone is not None else 0)
        here = self._of_buckets([number])
        state = 3 * self._visiting(here) if self.policy.optimizer == "offload" else 0
        return state + self.optimizer.workspace_bytes(here)

    def _at_most(self, waiting: Sequence[set[str]]) -> int:
        """Bytes of parameters that may be here whatever is made again in backward."""
        if self.window is None:
            return self._come((), backward=True)
        left = sum(size for size, names in zip(self.sizes, waiting, strict=True) if names)
        return max(self.window.bytes, min(self.window.stage_bytes, left))

    # The optimizer's step

    def _step(self, gradients: int) -> int:
        """The bytes of state on the device in the optimizer's step, while the largest bucket is updated."""
        order = [n for n in range(len(self.buckets)) if self._of_buckets([n])]
        if self.window is not None:
            order.reverse()
        visiting = self.policy.optimizer == "offload"
        stay = gradients - self._gradient_bytes([n for n in order if n in self.gone])
        most = before = 0
        for i, number in enumerate(order):
            following = self._of_buckets(order[i + 1 : i + 2])
            weights = self._come([number], backward=True)
            here = self._of_buckets([number])
            state = self._visiting(here) + self._visiting(following) if visiting else 0
            arrived = self.sizes[number] if number in self.gone else 0
            most = max(most, weights + before + state + stay + arrived + self.optimizer.workspace_bytes(here))
            before = self._visiting(here) if visiting else 0
            if self.window is not None:
                self.window.leave(number, sent=True)
        travelling = self._of_buckets(order)
        rest = {name: size for name, size in self.stepped.items() if self.offloadable.name(name) not in travelling}
        most = max(most, self._come((), backward=True) + before + stay + self.optimizer.workspace_bytes(rest))
        fixed = self._state_bytes(rest) if visiting else 0
        plain = self.optimizer.state_bytes(self.stepped) if visiting else 0
        workspace = self.optimizer.workspace_bytes(self.stepped)
        return most + fixed - (self._away() + gradients + plain + workspace)

    # Bytes

    def _numbers(self, names: Iterable[str]) -> list[int]:
        known = (self.of.get(self.offloadable.name(name)) for name in names)
        return list(dict.fromkeys(number for number in known if number is not None))

    def _of_buckets(self, numbers: Iterable[int]) -> dict[str, int]:
        """The parameters of buckets that are updated."""
        items = (item for number in numbers for item in self.buckets[number])
        return {item.name: item.bytes for item in items if item.name in self.stepped}

    def _gradient_bytes(self, numbers: Iterable[int]) -> int:
        return sum(map(self._alone, self._of_buckets(numbers).values()))

    def _alone(self, size: int) -> int:
        """Bytes that a tensor takes by itself."""
        return rounded(size) if self.costs.device_kind == "cuda" else size

    def _state_bytes(self, parameters: Mapping[str, int]) -> int:
        return self.optimizer.state_bytes(parameters)

    def _visiting(self, parameters: Mapping[str, int]) -> int:
        """The bytes of the optimizer's state for some parameters, laid out as a bucket."""
        return self.optimizer.state_bytes({name: rounded(size) for name, size in parameters.items()})


class _Window:
    """Which buckets are here, where not all can be."""

    def __init__(self, sizes: Sequence[int], stage_bytes: int) -> None:
        self.sizes, self.stage_bytes = sizes, stage_bytes
        self.here: dict[int, bool] = {}
        """Bucket -> whether it was used, not only started."""
        self.exposed: set[int] = set()
        """Buckets that user code may have written to: they are copied home when they leave."""
        self.sent = 0
        """Bytes that are being copied home."""

    @property
    def bytes(self) -> int:
        """Bytes of the buckets that are in the window, and of those that are still being copied back."""
        return sum(self.sizes[i] for i in self.here) + self.sent

    def need(self, numbers: Sequence[int], *, backward: bool) -> None:
        """Buckets are about to be used, all at once."""
        for number in numbers:
            if number not in self.here:
                self._room(self.sizes[number], numbers, backward)
            self.here[number] = True
        following = that_follows(numbers, self.sizes, self.stage_bytes, backward=backward)
        if following is not None and following not in self.here:
            self._room(self.sizes[following], numbers, backward)
            self.here[following] = False

    def _room(self, needed: int, kept: Sequence[int], backward: bool) -> None:
        here = sorted(self.here)
        for number in that_leave(here, self.sizes, needed, kept, self.stage_bytes, backward=backward):
            self.leave(number)

    def leave(self, number: int, *, sent: bool = False) -> None:
        """A bucket leaves, if it is here."""
        if self.here.pop(number, None) is not None:
            if sent or number in self.exposed:
                self.sent = self.sizes[number]
            self.exposed.discard(number)

    def pause(self) -> None:
        """Forward is over: what was only started leaves, the rest is what user code may write to."""
        self.here = {number: True for number, used in self.here.items() if used}
        self.exposed = set(self.here)


@dataclass(frozen=True)
class StateSavings:
    """What a policy for state changes in a step."""

    policy: StatePolicy
    bytes: npt.NDArray[np.int64]
    """Less (negative) or more at every moment of the plain step."""
    time_s: float

    @classmethod
    def of(
        cls,
        policy: StatePolicy,
        offloadable: OffloadableParams,
        plain: MemoryCurve,
        costs: Costs,
        optimizer: OptimizerCost,
        tier: OffloadTarget,
        seconds: tuple[float, float],
    ) -> StateSavings:
        """The effect of a policy on what can leave.

        Args:
            policy: where state lives.
            offloadable parameters: the parameters that can leave.
            plain: the step without it.
            costs: of the calls.
            optimizer: what it keeps per parameter.
            tier: where state goes.
            seconds: of forward and of backward.
        """
        changed = change_by_moment(policy, offloadable, plain, costs, optimizer)
        return cls(policy, changed, _time_s(policy, offloadable, optimizer, tier, *seconds))


def _time_s(
    policy: StatePolicy,
    offloadable: OffloadableParams,
    optimizer: OptimizerCost,
    tier: OffloadTarget,
    forward_s: float,
    backward_s: float,
) -> float:
    """What the step takes longer: of what passes while something is computed, only what is left."""
    total = sum(item.bytes for item in offloadable.items)
    slow = min(tier.in_bytes_per_s, tier.out_bytes_per_s)
    time_s = 0.0
    if policy.optimizer == "offload":
        time_s += optimizer.state_bytes({item.name: item.bytes for item in offloadable.items if item.trained}) / slow
    if policy.parameters == "offload":
        once = total / tier.in_bytes_per_s
        time_s += max(0.0, once - forward_s) + total / slow
        if policy.stage_bytes is not None:
            out_s = total / tier.out_bytes_per_s if policy.gradients == "offload" else 0.0
            time_s += max(0.0, max(once, out_s) - backward_s)
    if policy.gradients == "offload":
        time_s += total / tier.in_bytes_per_s
    return time_s
