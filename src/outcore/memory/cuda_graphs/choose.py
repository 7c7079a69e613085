"""Whether a step becomes CUDA graphs by itself: live steps are watched, graphs are tried, the faster stays.

A step of many small operations is bound by the interpreter, and graphs take that away. But they replay, and not every
loop can be replayed. So the model's own forward runs first, and what the loop does is seen:

    live ── watched for some steps ──┬── regular, and the device waits for the host ───▶ graphs, timed ──┬──▶ graphs
                                     └── anything else ──▶ live                                        └──▶ live

*Regular* is a loop in which every forward has one backward before the next forward, without ``retain_graph`` and
``create_graph``, in which gradients are gone when forward begins, inputs need none, and every call is of the same kind.
What graphs take is held against the budget when they are recorded, and what they read from Python is compared in every
call (`outcore.graph.reads.snapshot`), as with ``graphs=True``.

When something is different later (another batch size, evaluation in between, gradients that are added up, an attribute
that the loop has changed), that call runs live and the graphs give their memory back first, because both together would
not be within the budget. A loop that becomes regular again gets its graphs again, a few times.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from outcore.errors import PlanError
from outcore.graph.structure import leaves
from outcore.machine.units import format_time
from outcore.memory.cuda_graphs.pool import without_limit
from outcore.memory.saved_tensors.settings import PlannedCall, Settings

if TYPE_CHECKING:
    from outcore.memory.saved_tensors.managed_forward import ManagedForward

_WATCHED = 4
"""Live steps that are timed, after one that warms up."""
_WARM_UPS = 2
"""Steps of graphs that are not timed: the first records them."""
_HOST_BOUND = 1.05
"""Graphs are tried where a live step takes more than this over what its plan has the device do."""
_BEHIND = 0.1
"""Where the host is ahead of the device by more than this share of a step when the next begins, graphs gain nothing."""
_FASTER = 0.97
"""What a step of graphs must take at most of a live one."""
_IRREGULAR = 3
"""So many steps that were not regular, or returns to live steps, and nothing is tried any more."""
_OUTPUTS = 8
"""Outputs at which backward is looked for."""


class GraphChoice:
    """Watches the steps of a managed forward and lets another one, with graphs, take its place."""

    def __init__(
        self, settings: Settings, make: Callable[[Settings], ManagedForward], least_reserved_bytes: int = 0
    ) -> None:
        """Watch from the first step.

        Args:
            settings: for the step as graphs.
            make: a managed forward of the same model with other settings.
            least_reserved_bytes: to leave free where the settings leave so much that no plan is found.
        """
        self.settings, self.make, self.least_reserved_bytes = settings, make, least_reserved_bytes
        self.other: ManagedForward | None = None
        """Runs the step as graphs."""
        self.key: Hashable = None
        """Of the calls that are watched, or are graphs."""
        self.over = False
        """It is decided that steps stay live."""
        self.taken = False
        """It was decided that graphs are faster."""
        self.reason = ""
        """Why steps stay live."""
        self.live_s = self.graph_s = float("inf")
        self.irregular = 0
        self._restart()

    def _restart(self) -> None:
        """Watch from the beginning."""
        self.steps, self.fastest_s, self.began = 0, float("inf"), 0.0
        self.ahead_s = 0.0
        """By how much the host was ahead of the device at the end of the fastest step."""
        self.passes: list[int] = []
        """Backward passes since the last forward, by number."""

    def call(
        self, managed_forward: ManagedForward, key: Hashable, entry: PlannedCall, args: Any, kwargs: Any
    ) -> tuple[Any] | None:
        """Forward begins; what the graphs return, in a tuple, or none where the step is to run live."""
        if self.over:
            return None
        if self.other is not None:
            result = self._replayed(managed_forward, args, kwargs)
            if result is not None or self.over:
                return result
        if not self._regular(managed_forward, key, args, kwargs):
            self._irregular()
            return None
        self._timed(managed_forward)
        if self.steps <= _WATCHED + 1 and not self.taken:
            return None
        if self.steps <= 3:  # after a return to live steps, that graphs are faster is known
            return None
        if not self.taken:
            self.live_s = self.fastest_s
            if self.ahead_s > _BEHIND * self.live_s:
                self._stay("the device is busy while the host waits for it")
                return None
            if self.live_s <= _HOST_BOUND * entry.plan.outcome.time_s:
                self._stay("a step takes no longer than its operations")
                return None
        return self._begin(managed_forward, args, kwargs)

    def watch(self, result: Any) -> None:
        """A live forward is over; see what backward does with it."""
        if self.over or self.other is not None:
            return

        def passed(gradient: torch.Tensor) -> None:
            number = torch._C._current_graph_task_id()
            again = torch._C._autograd._get_current_graph_task_keep_graph() or torch.is_grad_enabled()
            if again or number not in self.passes:
                self.passes += [number] * (2 if again else 1)

        found = [t for _, t in leaves(result, torch.Tensor) if t.requires_grad and t.grad_fn is not None]
        for tensor in found[:_OUTPUTS]:
            tensor.register_hook(passed)

    def leave(self, managed_forward: ManagedForward) -> None:
        """Give the graphs up: something else needs their memory."""
        if self.other is None:
            return
        for entry in self.other.admitted.values():
            if entry is not None and entry.graphed is not None and not entry.graphed.under_way.active():
                entry.graphed.free()
        self.other = None
        self._irregular()

    def _irregular(self) -> None:
        self.irregular += 1
        if self.irregular > _IRREGULAR:
            self._stay("the loop is not regular")
        self._restart()

    def _stay(self, reason: str) -> None:
        """Steps are live from here on."""
        self.over, self.reason = True, reason

    def _regular(self, managed_forward: ManagedForward, key: Hashable, args: Any, kwargs: Any) -> bool:
        """Whether the step before was as graphs need it, and this call is of the same kind."""
        tensors = [t for _, t in leaves((args, kwargs), torch.Tensor)]
        kind = key, tuple((t.shape, t.stride(), t.dtype) for t in tensors)
        once = self.steps == 0 or (len(self.passes) == 1 and kind == self.key)
        self.passes, self.key = [], kind
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._stay("gradients are averaged over ranks")  # by somebody who holds on to where they are
        free = all(p.grad is None for p in managed_forward.parameters())
        return once and free and not any(t.requires_grad for t in tensors)

    def _timed(self, managed_forward: ManagedForward) -> None:
        """A forward begins: how long was the step before?"""
        issued = time.perf_counter()
        managed_forward.wait()
        now = time.perf_counter()
        if self.steps > 1 and now - self.began < self.fastest_s:
            self.fastest_s, self.ahead_s = now - self.began, now - issued
        self.steps, self.began = self.steps + 1, now

    def _begin(self, managed_forward: ManagedForward, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Record the step as graphs, if it can be and fits the budget, and take it."""
        found = self._recorded(managed_forward, self.settings, args, kwargs)
        if found is None and not self.over:  # what live steps leave to the allocator may be more than graphs need
            less = replace(self.settings, reserved_bytes=self.least_reserved_bytes)
            found = self._recorded(managed_forward, less, args, kwargs)
        if found is None:
            self._stay(self.reason)
            return None
        self.other, result = found
        self.other_key = self.other.key(args, kwargs)
        self._restart()
        return (result,)

    def _recorded(
        self, managed_forward: ManagedForward, settings: Settings, args: Any, kwargs: Any
    ) -> tuple[ManagedForward, Any] | None:
        """A managed forward that runs graphs, with the result of its first step; none if there is no plan for it, and
        then why; or it cannot be recorded at all, and steps stay live."""
        other = self.make(replace(settings, quiet=True))
        with warnings.catch_warnings(), without_limit(managed_forward.device):
            # Without a limit of the process: else workspaces could be refused for good.
            warnings.simplefilter("ignore")
            try:
                return other, other.run(*args, **kwargs)
            except PlanError as error:
                self.reason = f"CUDA graphs do not fit: {error}"
                self.over = error.least_bytes is None  # they were recorded, and took more
            except (RuntimeError, ValueError) as error:
                self._stay(f"the step cannot be recorded as CUDA graphs: {error}")
        del other
        managed_forward.give_back()
        return None

    def _replayed(self, managed_forward: ManagedForward, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Run the graphs, if this call is one of theirs."""
        other = self.other
        assert other is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same = other.varying is None and other.key(args, kwargs) == self.other_key
        entry = other.admitted.get(self.other_key) if same else None
        graphed = entry.graphed if entry is not None else None
        tensors = [t for _, t in leaves((args, kwargs), torch.Tensor)]
        if graphed is None or not graphed.ready(tensors):
            self.leave(managed_forward)
            self._say(managed_forward, "the loop has changed; the step runs call by call again")
            return None
        if not self.taken:
            self._timed(managed_forward)
            if self.steps > _WARM_UPS + _WATCHED:
                self.graph_s = self.fastest_s
                self._decide(managed_forward)
                if self.other is None:
                    return None
        return graphed(tensors)

    def _decide(self, managed_forward: ManagedForward) -> None:
        """Keep the faster."""
        live, graphs = format_time(self.live_s), format_time(self.graph_s)
        self.taken = self.graph_s <= _FASTER * self.live_s
        if self.taken:
            self._say(managed_forward, f"the step runs as CUDA graphs: {graphs} instead of {live}")
            return
        self.leave(managed_forward)
        self._stay("live steps are faster")
        self._say(managed_forward, f"as CUDA graphs the step takes {graphs}, call by call {live}; it runs call by call")

    def _say(self, managed_forward: ManagedForward, what: str) -> None:
        if not managed_forward.settings.quiet:
            print(f"outcore: {what}", file=sys.stderr)
