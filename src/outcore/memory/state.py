"""Parameters, gradients and optimizer state that live below the device and come when they are needed.

The loop stays as it is: ``loss.backward(); optimizer.step()``. Hooks notice which parameters are about to be used; the
optimizer's ``step`` is taken over and goes through the parameters lot by lot:

    forward        backward                    step
    need 0, 1, 2   (gradients arrive 2, 1, 0)  for each lot: bring state, update, send home        update="step"
    need 0, 1, 2   2: update, send; 1: ...     nothing left to do                                  update="backward"

Invariant: whenever user code runs, a parameter is either a view of the stage that the computing stream may read, or a
view of a home whose copy is complete. So whatever reads or writes parameters between calls (saving, loading, clipping,
averaging) is right without knowing of any of this.

``update="backward"`` gives up a part of that for speed: what was updated leaves and returns while other things still
run. It asks that nothing be done to gradients between ``backward()`` and ``step()``, and that parameters be written
through torch (``p.mul_``) and not behind its back (``p.data.mul_``). The first two steps are done the careful way and
watched; a loop that does not keep to this is told so and stays with the careful way.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outcore.errors import OutcoreError
from outcore.memory.lanes import Home, home_for, lanes_for
from outcore.memory.parcels import Parcel, Stage, lay_out, movable
from outcore.memory.stepping import Stepper, Visits
from outcore.planner.state import StatePolicy

__all__ = ["Lot", "StateKeeper", "uses_of"]

_WATCHED = 2
"""Steps that are watched before updates move into backward."""


class Lot:
    """Parameters that come, are updated and leave together."""

    def __init__(self, number: int, parameters: Sequence[nn.Parameter], weights: Parcel | None) -> None:
        self.number, self.parameters, self.weights = number, tuple(parameters), weights
        self.trained = tuple(p for p in parameters if p.requires_grad)
        self.missing = len(self.trained)
        """Gradients that backward has not brought yet."""
        self.updated = False
        """In this step, before ``optimizer.step()``."""
        self.seen: dict[int, tuple[int, int]] = {}
        """Gradients as they arrived: identity and version."""
        self.sent: torch.Tensor | None = None
        """What its home held after the last step, while the loop is watched."""


class Arrival:
    """A hook before a module's forward: what it computes with must be here."""

    def __init__(self, keeper: StateKeeper | None = None, lots: Sequence[Lot] = ()) -> None:
        self.keeper = weakref.ref(keeper) if keeper is not None else None
        self.lots = tuple(lots)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Before forward."""
        keeper = self.keeper() if self.keeper is not None else None
        if keeper is not None:
            for lot in self.lots:
                keeper.need(lot)

    def __reduce__(self) -> tuple[type[Arrival], tuple[()]]:
        return Arrival, ()  # a copied or saved model has no state elsewhere


class StateKeeper:
    """Keeps the state of one model and its optimizer below the device.

    Args:
        model: whose parameters these are.
        optimizer: that updates them.
        uses: for every call of the model in order, the module that makes it and the parameters it reads.
        policy: what lives where.
        device: where the model computes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        uses: Iterable[tuple[nn.Module, Sequence[nn.Parameter]]],
        policy: StatePolicy,
        device: torch.device,
    ) -> None:
        self.policy, self.device, self.lanes = policy, device, lanes_for(device)
        self.optimizer = optimizer
        self.home: Home | None = None
        self.open = False
        """A pass is under way whose backward may need the parameters as they are."""
        self.watched = 0 if policy.update == "backward" else -1
        self.fast = False
        self.settings: list[dict[str, Any]] | None = None
        """Of the optimizer when it updated in backward."""
        self.depth = 0
        self.stage: Stage | None = None
        users = [(m, [p for p in ps if movable(p)]) for m, ps in uses]
        self.lots = self._lots(p for _, ps in users for p in ps)
        self.of = {id(p): lot for lot in self.lots for p in lot.parameters}
        self.handles: list[Any] = []
        self._hook(users)
        self._original = optimizer.__dict__.get("step")
        self.stepper = Stepper(optimizer, optimizer.step)
        self.visits = Visits(self.stepper, device, self.lanes) if policy.optimizer == "offload" else None
        optimizer.step = self._stepped()  # type: ignore[method-assign]
        if self.visits is not None:
            settle = self.visits.settle
            self.handles.append(optimizer.register_state_dict_pre_hook(lambda _: settle()))
            for lot in self.lots:  # what it already has goes home
                self.visits.leave(lot.number, lot.trained)

    def _lots(self, parameters: Iterable[nn.Parameter]) -> list[Lot]:
        ordered = list({id(p): p for p in parameters}.values())
        groups = [[p for p in ordered if p.requires_grad is trained] for trained in (True, False)]
        laid = [row for group in groups for row in lay_out(group, self.policy.parcel_bytes)]
        if self.policy.parameters == "keep":
            return [Lot(i, [m.tensor for m in members], None) for i, (members, _) in enumerate(laid)]  # type: ignore[misc]
        place = {id(p): i for i, p in enumerate(ordered)}
        laid.sort(key=lambda row: min(place[id(m.tensor)] for m in row[0]))
        total = sum(size for _, size in laid)
        self.home = home_for(self.device, total)
        self.stage = Stage(self.device, total)
        lots, at = [], 0
        for i, (members, size) in enumerate(laid):
            parcel = Parcel(f"parameters {i}", members, self.home.memory[at : at + size], self.stage, self.lanes)
            parcel.adopt()
            lots.append(Lot(i, [m.tensor for m in members], parcel))  # type: ignore[misc]
            at += size
        return lots

    def _hook(self, users: Sequence[tuple[nn.Module, Sequence[nn.Parameter]]]) -> None:
        if self.policy.parameters == "offload":
            lots: dict[nn.Module, dict[Lot, None]] = {}
            for module, parameters in users:
                lots.setdefault(module, {}).update(dict.fromkeys(self.of[id(p)] for p in parameters))
            for module, needed in lots.items():
                if needed:
                    self.handles.append(module.register_forward_pre_hook(Arrival(self, list(needed))))
        if self.policy.update == "backward":
            reference = weakref.ref(self)

            def arrived(p: torch.Tensor) -> None:
                if (keeper := reference()) is not None:
                    keeper.arrived(p)

            for lot in self.lots:
                for p in lot.trained:
                    self.handles.append(p.register_post_accumulate_grad_hook(arrived))

    # Forward

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass; parameters come as they are needed."""
        if self.depth:
            return forward(*args, **kwargs)
        self.enter()
        self.depth += 1
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            self.depth -= 1
            self.go_home()
            raise
        self.depth -= 1
        self.open = self.open or torch.is_grad_enabled()
        if not self.open:
            self.go_home()
            return result
        for lot in self.lots:
            if lot.weights is not None and lot.weights.here:
                lot.weights.exposed = True
        self.settle()
        return result

    def enter(self) -> None:
        """A forward pass begins: what has left comes back, in the order in which it is needed."""
        leaving = []
        for lot in self.lots:
            parcel = lot.weights
            if parcel is None:
                continue
            if self.watched >= 0 and lot.sent is not None:
                self._watch_home(lot, parcel)
            if parcel.here and parcel.leaving:
                if parcel.touched or parcel.adopt():
                    parcel.send()
                self._depart(parcel)
                leaving.append(parcel)
            elif not parcel.here:
                parcel.adopt()
        for parcel in reversed(leaving):  # what left first can be back first, while the rest still leaves
            parcel.book()
        for lot in self.lots:
            if lot.weights is not None and not lot.weights.book():
                break

    def need(self, lot: Lot) -> None:
        """The parameters of a lot are about to be used."""
        parcel = lot.weights
        if parcel is None or parcel.here:
            return
        if not parcel.book():
            raise OutcoreError("there is no room for parameters on the device")
        parcel.arrive()

    def _depart(self, parcel: Parcel) -> None:
        if parcel.slot is None:
            return
        if parcel.here:  # a graph that is still alive must notice
            torch.autograd.graph.increment_version([m.tensor for m in parcel.members])
        parcel.depart()

    def go_home(self) -> None:
        """Everything that is here leaves; the host waits until it has."""
        for lot in self.lots:
            if lot.weights is not None:
                if lot.weights.here and (lot.weights.exposed or lot.weights.touched or lot.weights.adopt()):
                    lot.weights.send()
                self._depart(lot.weights)
        self.settle()

    def settle(self) -> None:
        """What is at home is complete."""
        for lot in self.lots:
            if lot.weights is not None and not lot.weights.here:
                lot.weights.settle()

    # Backward

    def arrived(self, p: torch.Tensor) -> None:
        """Backward has brought the gradient of a parameter."""
        lot = self.of[id(p)]
        assert p.grad is not None
        if lot.updated:
            raise OutcoreError(
                'a second backward before optimizer.step(): with update="backward" the first was already applied; '
                'use update="step" to add up gradients over several passes'
            )
        if not self.fast:
            lot.seen[id(p)] = (lot.seen.get(id(p), (0, 0))[0] + 1, p.grad._version)
            return
        lot.missing -= 1
        if lot.missing:
            return
        if self.settings is None:
            self.settings = self.stepper.settings()
        self.update(lot, then=self.lots[lot.number - 1] if lot.number else None)
        for q in lot.trained:
            q.grad = None
        lot.updated = True

    def update(self, lot: Lot, then: Lot | None) -> None:
        """Update a lot and send it home; the state of the next one may start to come."""
        self.need(lot)
        if self.visits is not None:
            self.visits.arrive(lot.number, lot.trained)
            if then is not None:
                self.visits.book(then.number)
        self.stepper.run(lot.trained)
        if self.visits is not None:
            self.visits.leave(lot.number, lot.trained)
        if lot.weights is not None:
            lot.weights.send()

    # The optimizer's step

    def _stepped(self) -> Callable[..., Any]:
        reference = weakref.ref(self)

        def step(closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            keeper = reference()
            assert keeper is not None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            keeper.step()
            return loss

        return step

    def step(self) -> None:
        """Do what is left of the optimizer's step."""
        if self.fast:
            self._check_settings()
        else:
            self._watch_gradients()
        waiting = [lot for lot in self.lots if not lot.updated]
        for i, lot in enumerate(waiting):
            if any(p.grad is not None for p in lot.trained):
                self.update(lot, then=waiting[i + 1] if i + 1 < len(waiting) else None)
                if self.fast:
                    for p in lot.trained:
                        p.grad = None
        self.stepper.rest(self.of.keys())
        for lot in self.lots:
            lot.missing, lot.updated, lot.seen = len(lot.trained), False, {}
        self.open, self.settings = False, None
        if not self.fast:
            self.go_home()
            if self.visits is not None:
                self.visits.settle()
            if self.watched >= 0:
                self._remember()

    def _check_settings(self) -> None:
        if self.settings is not None and repr(self.settings) != repr(self.stepper.settings()):
            raise OutcoreError(
                "the optimizer's settings changed between backward() and step(), after the parameters were updated in "
                'backward; change them after step(), or use update="step"'
            )

    # Watching the loop before updates move into backward

    def _watch_gradients(self) -> None:
        if self.watched < 0:
            return
        for lot in self.lots:
            for p in lot.trained:
                times, version = lot.seen.get(id(p), (0, 0))
                if times > 1:
                    self._stay("gradients of several passes are added up")
                elif times and (p.grad is None or p.grad._version != version):
                    self._stay("gradients are changed between backward() and step() (clipped, unscaled)")
                if self.watched < 0:
                    return
        self.watched += 1

    def _watch_home(self, lot: Lot, parcel: Parcel) -> None:
        if lot.sent is not None and not torch.equal(lot.sent, parcel.home):
            self._stay("parameters are changed between step() and the next forward pass")
        lot.sent = None

    def _remember(self) -> None:
        if self.watched >= _WATCHED:
            self.fast, self.watched = True, -1
            return
        for lot in self.lots:
            if lot.weights is not None:
                lot.sent = lot.weights.home.clone()

    def _stay(self, why: str) -> None:
        self.watched = -1
        warnings.warn(
            f'outcore: updates stay in optimizer.step() although update="backward" was asked for: {why}', stacklevel=4
        )

    # The end

    def close(self) -> None:
        """Everything is on the device again, in ordinary tensors; hooks are gone."""
        self.go_home()
        for handle in self.handles:
            handle.remove()
        for lot in self.lots:
            for member in lot.weights.members if lot.weights is not None else ():
                member.tensor.data = member.tensor.data.to(self.device, copy=True)
        if self.visits is not None:
            self.visits.close()
        if self._original is None:
            self.optimizer.__dict__.pop("step", None)
        else:
            self.optimizer.step = self._original  # type: ignore[method-assign]
        self.lanes.close()
        if self.home is not None:
            self.home.close()
        self.lots, self.handles = [], []


def uses_of(model: nn.Module, calls: Iterable[tuple[str, Sequence[str]]]) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Modules with the parameters their calls read.

    Args:
        model: the model.
        calls: block and names of parameters of each call, in order.
    """
    named: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for block, names in calls:
        read = [named[n] for n in names if n in named]
        if not read:
            continue
        path = block
        while True:
            try:
                module = model.get_submodule(path)
                break
            except AttributeError:
                path = path.rpartition(".")[0]
        owner = any(isinstance(model.get_submodule(n.rpartition(".")[0]), nn.RNNBase) for n in names if n in named)
        if not owner:
            found.append((module, read))
    return found
