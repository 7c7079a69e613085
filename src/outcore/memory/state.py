"""Parameters, gradients and optimizer state that live below the device and come when they are needed.

The loop stays as it is: ``loss.backward(); optimizer.step()``. Hooks notice which parameters are about to be used; the
optimizer's ``step`` is taken over and goes through the parameters lot by lot:

    forward        backward                    step
    need 0, 1, 2   (gradients arrive 2, 1, 0)  for each lot: bring state, update, send home        update="step"
    need 0, 1, 2   2: update, send; 1: ...     nothing left to do                                  update="backward"

If the stage has room for all parameters, they come once and stay until they were updated. If not (`stage_bytes`), they
pass through it: a lot leaves when others need the room and comes again for backward, which finds it by the handles
that autograd holds instead of the weights it saved.

Invariant: whenever user code runs, a parameter is either a view of the stage that the computing stream may read, or a
view of a home whose copy is complete. So whatever reads or writes parameters between calls (saving, loading, clipping,
averaging) is right without knowing of any of this.

``update="backward"`` gives up a part of that for speed: what was updated leaves and returns while other things still
run. It asks that nothing be done to gradients between ``backward()`` and ``step()``, and that parameters be written
through torch (``p.mul_``) and not behind its back (``p.data.mul_``); `outcore.memory.watch` looks at the first steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from outcore.errors import OutcoreError
from outcore.graph.recording import Step, Tape
from outcore.memory.cell import Handle
from outcore.memory.gradients import GradientHomes
from outcore.memory.lanes import lanes_for
from outcore.memory.lots import Borrowed, Lot, Use, make_lots
from outcore.memory.parcels import Parcel
from outcore.memory.stepping import Stepper, Visits
from outcore.memory.watch import Watch
from outcore.planner.state import StatePolicy

__all__ = ["StateKeeper"]


def _nothing() -> None:
    pass


class _Arrival:
    """A hook before a module's forward: what it computes with must be here."""

    def __init__(self, keeper: StateKeeper | None = None, lots: Sequence[Lot] = (), *, holds: bool = False) -> None:
        self.keeper = weakref.ref(keeper) if keeper is not None else None
        self.lots, self.holds = tuple(lots), holds

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Before forward."""
        keeper = self.keeper() if self.keeper is not None else None
        if keeper is not None:
            keeper.need(*self.lots)
            if self.holds:
                keeper.held.update(self.lots)

    def __reduce__(self) -> tuple[type[_Arrival], tuple[()]]:
        return type(self), ()  # a copied or saved model has no state elsewhere


class _Departure(_Arrival):
    """A hook after the forward of a module that called others in between."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """After forward."""
        keeper = self.keeper() if self.keeper is not None else None
        if keeper is not None:
            keeper.held.subtract(self.lots)


@dataclass
class Stats:
    """How many bytes of parameters are on the device, where they pass through it."""

    here_bytes: int = 0
    peak_bytes: int = 0

    def change(self, size: int) -> None:
        """Some come or leave."""
        self.here_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.here_bytes)


class StateKeeper:
    """Keeps the state of one model and its optimizer below the device.

    Args:
        optimizer: that updates the parameters.
        uses: the calls of the model that read parameters, in order (`outcore.memory.lots.uses_of`).
        policy: what lives where.
        device: where the model computes.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, uses: Sequence[Use], policy: StatePolicy, device: torch.device
    ) -> None:
        self.policy, self.device, self.lanes, self.optimizer = policy, device, lanes_for(device), optimizer
        self.stepper = Stepper(optimizer, optimizer.step)
        self.windowed = policy.stage_bytes is not None
        self.lots, self.home = make_lots((p for _, _, ps in uses for p in ps), policy, device, self.lanes)
        self.of = {id(p): lot for lot in self.lots for p in lot.parameters}
        self.calls: dict[str, list[Lot]] = {}
        """Lots that a call of the model reads."""
        self.at: dict[int, Lot] = {}
        """Address of memory -> the lot that is there, where parameters pass through."""
        self.held: Counter[Lot] = Counter()
        """Lots that a module needs until its forward is over."""
        self.open = False
        """A pass is under way whose backward may need the parameters as they are."""
        self.watch = Watch() if policy.update == "backward" else None
        self.settings: list[dict[str, Any]] | None = None
        """Of the optimizer when it updated in backward."""
        self.inside = False
        self.stats = Stats()
        self.called_back = False
        self.visits = Visits(self.stepper, device, self.lanes) if policy.optimizer == "offload" else None
        self.gradients: GradientHomes | None = None
        self.handles: list[Any] = []
        self.hooks: dict[int, Any] = {}
        """Parameter (id) -> the hook on its gradient."""
        self._own_step = optimizer.__dict__.get("step")
        try:
            if policy.gradients == "offload":
                self.gradients = GradientHomes(self.lots, device, self.lanes)
            self._take_over(uses)
        except BaseException:
            self.close()
            raise

    def _take_over(self, uses: Sequence[Use]) -> None:
        """From now on state comes and goes by the policy."""
        optimizer = self.optimizer
        self._hook_modules(uses)
        self._hook_gradients()
        optimizer.step = self._stepped()  # type: ignore[method-assign]
        if self.visits is not None:
            settle = weakref.WeakMethod(self.settle)
            self.handles.append(optimizer.register_state_dict_pre_hook(lambda _: (settle() or _nothing)()))
            for lot in self.lots:  # what there is already goes home
                self.visits.leave(lot.number, lot.trained)

    @property
    def fast(self) -> bool:
        """Whether parameters are updated in backward."""
        return self.watch is not None and self.watch.verdict is True

    def _hook_modules(self, uses: Iterable[Use]) -> None:
        lots: dict[nn.Module, dict[Lot, None]] = {}
        for call, module, parameters in uses:
            read = dict.fromkeys(self.of[id(p)] for p in parameters)
            self.calls.setdefault(call, []).extend(read)
            lots.setdefault(module, {}).update(read)
        for module, needed in lots.items() if self.policy.parameters == "offload" else ():
            holds = self.windowed and any(True for _ in module.children())
            self.handles.append(module.register_forward_pre_hook(_Arrival(self, list(needed), holds=holds)))
            if holds:
                left = _Departure(self, list(needed))
                self.handles.append(module.register_forward_hook(left, always_call=True))

    def _hook_gradients(self) -> None:
        reference = weakref.ref(self)

        def arrived(p: torch.Tensor) -> None:
            if (keeper := reference()) is not None:
                keeper.arrived(p)

        def before(number: int) -> Callable[[torch.Tensor], None]:
            def hook(_: torch.Tensor) -> None:
                if (keeper := reference()) is not None:
                    keeper.arriving(keeper.lots[number])

            return hook

        for lot in self.lots if self.watch is not None or self.windowed else ():
            for p in lot.trained:
                self.hooks[id(p)] = p.register_post_accumulate_grad_hook(arrived)
                if self.gradients is not None:
                    self.handles.append(p.register_hook(before(lot.number)))

    # Forward

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass; parameters come as they are needed."""
        if self.inside:
            return forward(*args, **kwargs)
        self.enter()
        self.inside = True
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            if not self.open:
                self.go_home()
            raise
        finally:
            self.inside = False
        self.open = self.open or torch.is_grad_enabled()
        if not self.open:
            self.go_home()
            return result
        for parcel in self.parcels:
            parcel.exposed = parcel.here
        self.settle()
        return result

    @property
    def parcels(self) -> list[Parcel]:
        """The parameters, as far as they are not on the device for good."""
        return [lot.weights for lot in self.lots if lot.weights is not None]

    def enter(self) -> None:
        """A forward pass begins: what has left comes back, in the order in which it is needed."""
        if self.watch is not None and self.watch.verdict is None:
            self.watch.before_forward(self.lots)
        leaving = []
        for parcel in self.parcels:
            if parcel.here and parcel.leaving:
                if parcel.touched or parcel.adopt():
                    parcel.send()
                leaving.append(parcel)
            elif not parcel.here:
                parcel.adopt()
        if self.windowed:
            return
        for parcel in reversed(leaving):  # what left first can be back first, while the rest still leaves
            parcel.turn()
        for parcel in self.parcels:
            self._book(parcel)

    def need(self, *lots: Lot, backward: bool = False) -> None:
        """The parameters of some lots are about to be used, all at once."""
        for lot in lots:
            parcel = lot.weights
            if parcel is None or (parcel.here and not parcel.arriving):
                continue
            if parcel.place is None:
                self._make_room(parcel.bytes, lots, backward)
            self._book(parcel)
            parcel.arrive()
            if self.windowed:
                assert parcel.place is not None
                self.at[parcel.place.memory.untyped_storage().data_ptr()] = lot
        if self.windowed and lots:
            self._look_ahead(lots, backward)

    def _book(self, parcel: Parcel) -> None:
        if parcel.place is None:
            self.stats.change(parcel.bytes)
        parcel.book()

    def _look_ahead(self, lots: Sequence[Lot], backward: bool) -> None:
        """Start to bring the lot that comes next, if there is room for it beside these."""
        numbers = [lot.number for lot in lots]
        number = min(numbers) - 1 if backward else max(numbers) + 1
        if not 0 <= number < len(self.lots) or (parcel := self.lots[number].weights) is None or parcel.place:
            return
        assert self.policy.stage_bytes is not None
        if parcel.bytes + sum(lot.weights.bytes for lot in lots if lot.weights) <= self.policy.stage_bytes:
            self._make_room(parcel.bytes, lots, backward)
            self._book(parcel)

    def _make_room(self, size: int, kept: Sequence[Lot], backward: bool) -> None:
        """Send away what will not be needed for longest, until there is room for so many bytes more."""
        if self.policy.stage_bytes is None:
            return
        there = [(lot, lot.weights) for lot in self.lots if lot.weights is not None and lot.weights.place is not None]
        taken = sum(parcel.bytes for _, parcel in there)
        for lot, parcel in reversed(there) if backward else there:
            if taken + size <= self.policy.stage_bytes:
                return
            if lot not in kept and self.held[lot] <= 0:
                taken -= parcel.bytes
                self._release(parcel)

    def _release(self, parcel: Parcel) -> None:
        """A parcel leaves; what it holds is at home, or on its way."""
        if parcel.here and (parcel.exposed or parcel.touched or parcel.adopt()):
            parcel.send()
        self._depart(parcel)

    def _depart(self, parcel: Parcel) -> None:
        if parcel.place is None:
            return
        self.stats.change(-parcel.bytes)
        if self.windowed:
            self.at.pop(parcel.place.memory.untyped_storage().data_ptr(), None)
        elif parcel.here:  # a graph that is still alive must notice
            torch.autograd.graph.increment_version([m.tensor for m in parcel.members])
        parcel.depart()

    def go_home(self) -> None:
        """Everything that is here leaves; the host waits until it has."""
        for parcel in self.parcels:
            self._release(parcel)
        self.settle()

    def settle(self) -> None:
        """What is at home is complete."""
        for parcel in self.parcels:
            if not parcel.here:
                parcel.settle()
        for others in (self.visits, self.gradients):
            if others is not None:
                others.settle()

    @contextlib.contextmanager
    def pretending(self) -> Iterator[None]:
        """Parameters look as if they were on the device, for whoever looks no further than their shapes."""
        if not self.windowed:
            self.need(*self.lots)
        away = [m for parcel in self.parcels if not parcel.here for m in parcel.members]
        before = [m.tensor.data for m in away]
        try:
            for member in away if self.device.type != "cpu" else ():
                dtype, size, stride, _ = member.geometry
                hollow = torch.empty_strided(size, stride, dtype=dtype, device=self.device)
                hollow.untyped_storage().resize_(0)
                member.tensor.data = hollow
            yield
        finally:
            for member, home in zip(away, before, strict=True):
                member.tensor.data = home

    # What replays a recording asks these

    def perform(self, tape: Tape, step: Step) -> None:
        """Run a step of a recording."""
        if (lots := self.calls.get(step.name)) is not None:
            self.need(*lots)
        Tape.step(tape, step)

    def summon(self, steps: Iterable[Step]) -> None:
        """Steps are about to run again in backward."""
        lots = dict.fromkeys(lot for step in steps for lot in self.calls.get(step.name, ()))
        self.need(*lots, backward=True)

    def hooked(self) -> contextlib.AbstractContextManager[Any]:
        """Hold what autograd saves, where parameters pass through; the model runs as it is."""
        if not self.windowed:
            return contextlib.nullcontext()

        def pack(tensor: torch.Tensor) -> Any:
            if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                return tensor.detach()
            return self.claim(tensor) or Handle(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            return packed.unpack() if isinstance(packed, Handle) else packed

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def claim(self, tensor: torch.Tensor) -> Handle | None:
        """What autograd is to hold instead of a tensor that lies in the memory of a lot."""
        lot = self.at.get(tensor.untyped_storage().data_ptr()) if self.at else None
        return Borrowed(tensor, lot, self) if lot is not None else None

    # Backward

    def arriving(self, lot: Lot) -> None:
        """A gradient of a lot is about to be added to what is there."""
        if self.gradients is not None and self.gradients.away(lot):
            self.need(lot, backward=True)
            self.gradients.come(lot)

    def arrived(self, p: torch.Tensor) -> None:
        """Backward has brought the gradient of a parameter."""
        lot = self.of[id(p)]
        if lot.updated:
            raise OutcoreError(
                'a second backward before optimizer.step(): with update="backward" the first was already applied; '
                'use update="step" to add up gradients over several passes'
            )
        if self.fast:
            if any(q.grad is None for q in lot.trained):
                return  # the last one of the first steps is not the last one any more: the step does what is left
        else:
            if self.watch is not None:
                self.watch.gradient(lot, p)
            lot.arrived.add(id(p))
            if len(lot.arrived) < len(lot.trained):
                return
            lot.arrived.clear()
        if self.fast:
            if self.settings is None:
                self.settings = self.stepper.settings()
            self.update(lot, then=self.lots[lot.number - 1] if lot.number else None)
            for q in lot.trained:
                q.grad = None
            lot.updated = True
        elif self.windowed:
            self._leave_gradients(lot)

    def _leave_gradients(self, lot: Lot) -> None:
        """A lot is not needed any more in this pass, and its gradients may go home."""
        assert lot.weights is not None
        home = self.gradients.leave(lot) if self.gradients is not None else None
        self._release(lot.weights)
        if home is not None:
            assert self.gradients is not None
            self.gradients.stay(lot, home)
        if not self.called_back:
            self.called_back = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)

    def _backward_is_over(self) -> None:
        self.called_back = False
        self.settle()

    def update(self, lot: Lot, then: Lot | None) -> None:
        """Update a lot and send it home; the state of the next one may start to come."""
        self.need(lot, backward=True)
        home = None
        if self.gradients is not None and self.gradients.away(lot):
            home = self.gradients.homes[lot.number].memory
            self.gradients.come(lot)
        if self.visits is not None:
            self.visits.arrive(lot.number, lot.trained)
            if then is not None:
                self.visits.book(then.number)
        self.stepper.run(lot.trained)
        if self.visits is not None:
            self.visits.leave(lot.number, lot.trained)
        if lot.weights is not None:
            lot.weights.send()
            if self.windowed:
                self._depart(lot.weights)
        if home is not None:
            assert self.gradients is not None
            self.gradients.stay(lot, home)

    # The optimizer's step

    def _stepped(self) -> Callable[..., Any]:
        reference, own = weakref.ref(self), self.stepper.step

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            keeper = reference()
            if keeper is None:  # the model is gone
                return own(closure)
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with keeper.stepper.hooked():
                keeper.step()
            return loss

        return MethodType(step, self.optimizer)  # schedulers expect a method

    def step(self) -> None:
        """Do what is left of the optimizer's step."""
        fast = self.fast
        if fast:
            self._check_settings()
        elif self.watch is not None and self.watch.verdict is None:
            self.watch.before_step(self.lots)
        waiting = [lot for lot in self.lots if not lot.updated and any(p.grad is not None for p in lot.trained)]
        if self.windowed:
            waiting.reverse()  # the first ones are then here when forward begins
        for i, lot in enumerate(waiting):
            self.update(lot, then=waiting[i + 1] if i + 1 < len(waiting) else None)
            for p in lot.trained if fast else ():
                p.grad = None
        self.stepper.rest(self.of.keys())
        for lot in self.lots:
            lot.updated = False
            lot.arrived.clear()
        self.open, self.settings = False, None
        if not fast or self.windowed:
            self.go_home()
        if self.watch is not None and not fast:
            self.watch.after_step(self.lots)
            if self.fast:  # from now on only the last gradient of each lot is of interest
                for other in self.hooks.keys() - set(self.watch.last.values()):
                    self.hooks.pop(other).remove()

    def _check_settings(self) -> None:
        if self.settings is not None and repr(self.settings) != repr(self.stepper.settings()):
            raise OutcoreError(
                "the optimizer's settings changed between backward() and step(), after the parameters were updated in "
                'backward; change them after step(), or use update="step"'
            )

    # The end

    def close(self) -> None:
        """Everything is on the device again, in ordinary tensors; hooks are gone."""
        self.go_home()
        for handle in (*self.handles, *self.hooks.values()):
            handle.remove()
        for parcel in self.parcels:
            for member in parcel.members:
                grad, member.tensor.grad = member.tensor.grad, None
                member.tensor.data = member.tensor.data.to(self.device, copy=True)
                if grad is not None:
                    member.tensor.grad = grad.to(self.device, copy=self.gradients is not None)
        for others in (self.visits, self.gradients):
            if others is not None:
                others.close()
        if self._own_step is None:
            self.optimizer.__dict__.pop("step", None)
        else:
            self.optimizer.step = self._own_step  # type: ignore[method-assign]
        self.lanes.close()
        if self.home is not None:
            self.home.close()
        self.lots, self.handles, self.calls, self.of = [], [], {}, {}
