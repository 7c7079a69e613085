"""All members' optimizers, stepped as one.

The user makes one ordinary torch optimizer per member, on the member's own parameters. Where all are of one kind,
their state is stacked like the parameters, each optimizer's ``state`` holds views of its slices, and one formula
updates all members with their own numbers, read from ``param_groups`` before every step. So schedulers,
``state_dict()`` and manual changes of a learning rate work as they always do. Where the kinds or formulas differ,
each optimizer steps by itself on views: same result, more kernels.

A step has two halves. `prepare` runs on the host and writes each member's numbers into one small tensor per group;
`apply` only launches kernels, so a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from outcore.errors import FuseError
from outcore.fusion.optimizer.fused_optimizer import FlatUpdate
from outcore.fusion.optimizer.updates import UPDATES, Numbers, OptimizerUpdate
from outcore.fusion.stack import Stack


@dataclass(eq=False)
class _Clock:
    """How often the parameters that share it were stepped, per member, and the scalars their optimizer keeps.

    All rows are equal; there is one per parameter, because torch's optimizers count each parameter in its own tensor.
    """

    names: list[str]
    steps: Tensor
    """``[parameters, members]``"""
    scalars: dict[str, Tensor]

    def only(self, names: set[str]) -> _Clock:
        """A copy for some of the parameters."""
        rows = [i for i, name in enumerate(self.names) if name in names]
        kept = {key: tensor[rows] for key, tensor in self.scalars.items()}
        return _Clock([self.names[i] for i in rows], self.steps[rows], kept)


@dataclass(eq=False)
class _Bundle:
    """Parameters with the same hyperparameters: of one group, one clock and one dtype."""

    group: int
    clock: _Clock
    dtype: torch.dtype
    names: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    numbers: Tensor | None = None
    """``[rows, members]`` on the device."""
    staged: Tensor | None = None
    """The same on the host, as last sent."""
    fast: FlatUpdate | Literal[False] | None = None
    """One kernel for all of it; False where there is none, None before it was looked for."""


class StackedOptimizer:
    """The optimizers of the members of a stack."""

    def __init__(self, stack: Stack, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.stack, self.optimizers = stack, list(optimizers)
        self.groups: list[list[str]] = [_names(stack, g["params"]) for g in optimizers[0].param_groups]
        self.names = [name for group in self.groups for name in group]
        self.state: dict[str, dict[str, Tensor]] = {}
        self.clocks: dict[str, _Clock] = {}
        self.bundles: list[_Bundle] = []
        self._exposed: dict[int, dict[str, Tensor]] = {}
        """The state of the first parameter that each optimizer was given."""
        self.arrangement = 0
        """A number that changes when the tensors that hold the hyperparameters do."""
        self.separate_reason = self._why_separate()
        """Why the optimizers step one by one; None if they step together."""
        if self.separate_reason is None:
            with torch.no_grad():
                self._gather()

    @property
    def update(self) -> OptimizerUpdate:
        """The common formula."""
        return UPDATES[type(self.optimizers[0])]

    @torch.no_grad()
    def preallocate(self) -> None:
        """Allocate the state before a step allocates anything temporary."""
        for bundle in self.bundles:
            self._fast(bundle, self.optimizers[0].param_groups[bundle.group])

    def prepare(self, names: Sequence[str], counted: Sequence[bool] | None = None) -> None:
        """Count the step and copy every member's hyperparameters to the device.

        `names` are the parameters with a gradient; `counted` says which members step, where that is known.
        """
        for optimizer in self.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
        if self.separate_reason is None:
            self._notice_loaded_state()
            stepped = set(names)
            self._split(stepped)
            seen: set[int] = set()
            who = None if counted is None else torch.tensor(counted, dtype=torch.float32, device="cpu")
            for bundle in self._bundled(stepped):
                if id(bundle.clock) not in seen:
                    bundle.clock.steps += 1 if who is None else who
                self._stage(bundle, first=id(bundle.clock) not in seen)
                seen.add(id(bundle.clock))

    @torch.no_grad()
    def apply(self, grads: Mapping[str, Tensor], alive: Tensor | None) -> None:
        """Step every living member; all of them where `alive` is None."""
        if self.separate_reason is not None:
            self._step_alone(grads, alive)
            return
        for bundle in self._bundled(set(grads)):
            numbers = bundle.numbers
            assert numbers is not None
            group = self.optimizers[0].param_groups[bundle.group]
            if alive is not None and (fast := self._fast(bundle, group)) is not None:
                fast(grads, numbers, alive)
                continue
            for name in bundle.names:
                p = self.stack.parameters[name].detach()
                shape = (-1, *[1] * (p.dim() - 1))
                h = {row: numbers[i].view(shape) for i, row in enumerate(bundle.rows)}
                kept = self.state[name]
                made = dict(kept)
                new = self.update.apply(p, grads[name], made, h, group)
                mask = None if alive is None else alive.view(shape)
                for target, value in ((p, new), *((kept[k], made[k]) for k in kept)):
                    target.copy_(value if mask is None else torch.where(mask, value, target))

    def replace(self, slot: int, optimizer: torch.optim.Optimizer) -> None:
        """Another optimizer takes over a slot whose parameters were replaced."""
        self.optimizers[slot] = optimizer
        reason = self._why_separate()
        if (reason is None) != (self.separate_reason is None):
            raise FuseError(
                f"slot {slot}: the new optimizer cannot join the others: {reason or 'they step one by one'}"
            )
        if self.separate_reason is None:
            self._take_over(slot)

    @torch.no_grad()
    def _take_over(self, slot: int) -> None:
        """Continue from the state of a member's own optimizer."""
        for name in self.names:
            for key, tensor in self.state[name].items():
                tensor[slot].copy_(self._imported(name, slot, key))
            self._start_clock(self.clocks[name], name, slot)
            self._expose(name, slot)

    def _notice_loaded_state(self) -> None:
        """Take in new state tensors that ``optimizer.load_state_dict`` put where our views were."""
        name = self.names[0]
        for slot, optimizer in enumerate(self.optimizers):
            for key, seen in self._exposed.get(slot, {}).items():
                if optimizer.state.get(self.stack.member(name, slot), {}).get(key) is not seen:
                    self._take_over(slot)
                    break

    def _fast(self, bundle: _Bundle, group: Mapping[str, Any]) -> FlatUpdate | None:
        """One kernel for the whole bundle, where there is one."""
        if bundle.fast is None:
            bundle.fast = FlatUpdate.find(type(self.optimizers[0]), self.stack, self.state, bundle.names, group)
            for name in bundle.names if bundle.fast else ():
                for slot in range(len(self.stack)):
                    self._expose(name, slot)
        return bundle.fast or None

    def _why_separate(self) -> str | None:
        first = self.optimizers[0]
        if len(self.optimizers) == 1 and not any(p.is_cuda for p in self.stack.parameters.values()):
            return "it is one"
        if type(first) not in UPDATES:
            return f"no fused form of {type(first).__name__}"
        update = UPDATES[type(first)]
        for slot, other in enumerate(self.optimizers):
            if type(other) is not type(first):
                return f"{type(other).__name__} beside {type(first).__name__}"
            if len(other.param_groups) != len(first.param_groups):
                return "different parameter groups"
            for names, ours, theirs in zip(self.groups, first.param_groups, other.param_groups, strict=True):
                if _names(self.stack, theirs["params"]) != names:
                    return "different parameter groups"
                for flag in update.flags:
                    if ours.get(flag) != theirs.get(flag):
                        return f"model {slot} has {flag}={theirs.get(flag)}, model 0 {ours.get(flag)}"
                if theirs.get("differentiable"):
                    return "differentiable=True"
        return None

    # Gathering state

    def _gather(self) -> None:
        for index, names in enumerate(self.groups):
            groups = [o.param_groups[index] for o in self.optimizers]
            keys = dict.fromkeys(k for group in groups for k in self.update.state(group))
            members = len(self.stack)
            shape = (len(names), members)
            scalars = {
                key: torch.zeros(shape, dtype=_scalar_dtype(), device="cpu") for key in self.update.scalars or {}
            }
            clock = _Clock(names, torch.zeros(shape, device="cpu"), scalars)
            histories: dict[tuple[float, ...], set[str]] = {}
            for i, name in enumerate(names):
                for slot in range(members):
                    self._start_clock(clock, name, slot)
                histories.setdefault(tuple(clock.steps[i].tolist()), set()).add(name)
            for together in histories.values():
                self.clocks |= dict.fromkeys(together, clock.only(together))
            for name in names:
                self.state[name] = {}
                for key in keys:
                    self.state[name][key] = torch.empty_like(self.stack.parameters[name], requires_grad=False)
                    for slot in range(members):
                        self.state[name][key][slot].copy_(self._imported(name, slot, key))
                for slot in range(members):
                    self._expose(name, slot)
        self._bundle()

    def _imported(self, name: str, slot: int, key: str) -> Tensor:
        parameter = self.stack.member(name, slot)
        found = self.optimizers[slot].state.get(parameter, {}).get(key)
        if found is not None:
            return torch.as_tensor(found, device=parameter.device)
        group = self._group(name, slot)
        if key == "ax":
            return torch.zeros_like(parameter)
        return torch.full_like(parameter, self.update.first(key, group), requires_grad=False)

    def _start_clock(self, clock: _Clock, name: str, slot: int) -> None:
        state = self.optimizers[slot].state.get(self.stack.member(name, slot), {})
        begun = 1.0 if state.get("momentum_buffer") is not None else 0.0
        row = clock.names.index(name)
        clock.steps[row, slot] = float(state.get("step", begun))
        for key, start in (self.update.scalars or {}).items():
            clock.scalars[key][row, slot] = float(state.get(key, start(self._group(name, slot))))

    def _group(self, name: str, slot: int) -> dict[str, Any]:
        index = next(i for i, names in enumerate(self.groups) if name in names)
        return self.optimizers[slot].param_groups[index]

    def _expose(self, name: str, slot: int) -> None:
        """Give the member's own optimizer views of its slice of the state, under torch's names."""
        state = self.optimizers[slot].state[self.stack.member(name, slot)]
        wanted = self.update.state(self._group(name, slot))
        for key, tensor in self.state[name].items():
            if key in wanted:
                state[key] = tensor[slot]
        clock = self.clocks[name]
        row = clock.names.index(name)
        if type(self.optimizers[slot]) is not torch.optim.SGD:
            state["step"] = clock.steps[row, slot]
        for key, tensor in clock.scalars.items():
            state[key] = tensor[row, slot]
        if name == self.names[0]:
            self._exposed[slot] = {key: value for key, value in state.items() if isinstance(value, Tensor)}

    # Bundles

    def _bundle(self) -> None:
        found: dict[tuple[int, int, torch.dtype], _Bundle] = {}
        for index, names in enumerate(self.groups):
            for name in names:
                clock, dtype = self.clocks[name], self.stack.parameters[name].dtype
                wide = dtype if dtype == torch.float64 else torch.float32
                bundle = found.setdefault((index, id(clock), wide), _Bundle(index, clock, wide))
                bundle.names.append(name)
        self.bundles = list(found.values())
        self.arrangement += 1

    def _bundled(self, names: set[str]) -> list[_Bundle]:
        return [b for b in self.bundles if b.names[0] in names]

    def _split(self, stepped: set[str]) -> None:
        """Give parameters that are stepped while others of their clock are not a clock of their own."""
        torn = [b.clock for b in self.bundles if 0 < len(stepped & set(b.names)) < len(b.names)]
        for clock in {id(c): c for c in torn}.values():
            for part in (set(clock.names) & stepped, set(clock.names) - stepped):
                self.clocks |= dict.fromkeys(part, clock.only(part))
            for name in clock.names:
                for slot in range(len(self.stack)):
                    self._expose(name, slot)
        if torn:
            self._bundle()

    def _stage(self, bundle: _Bundle, *, first: bool) -> None:
        """Compute and copy the hyperparameters of this step; the clock counts once, whichever dtypes share it."""
        clock = bundle.clock
        rows: list[Numbers] = []
        for slot, optimizer in enumerate(self.optimizers):
            kept = {name: float(t[0, slot]) for name, t in clock.scalars.items()}
            group = optimizer.param_groups[bundle.group]
            rows.append(self.update.numbers(group, max(1.0, float(clock.steps[0, slot])), kept))
            if first:
                for name, value in kept.items():
                    clock.scalars[name][:, slot] = value
        bundle.rows = list(rows[0])
        table = torch.tensor([[row[name] for row in rows] for name in bundle.rows], dtype=bundle.dtype, device="cpu")
        device = self.stack.parameters[bundle.names[0]].device
        if bundle.numbers is None:
            bundle.numbers = torch.empty(table.shape, dtype=bundle.dtype, device=device)
        if bundle.staged is None or not torch.equal(bundle.staged, table):
            # Pageable memory on purpose: a small copy from it is taken before the call returns, and stays in order.
            bundle.numbers.copy_(table, non_blocking=True)
            bundle.staged = table

    def _step_alone(self, grads: Mapping[str, Tensor], alive: Tensor | None) -> None:
        living = [True] * len(self.stack) if alive is None else alive.tolist()
        for slot, optimizer in enumerate(self.optimizers):
            if not living[slot]:
                continue
            for name in self.names:
                self.stack.member(name, slot).grad = grads[name][slot] if name in grads else None
            with torch.enable_grad():
                optimizer.step()
            for name in self.names:
                self.stack.member(name, slot).grad = None


def _names(stack: Stack, params: Sequence[Tensor]) -> list[str]:
    found = []
    for p in params:
        if id(p) not in stack.owners:
            raise FuseError(
                "an optimizer has a parameter that is not its model's; make it from the parameters it is given: "
                "optimizer=lambda params, i: torch.optim.Adam(params, lr=rates[i])"
            )
        found.append(stack.owners[id(p)][0])
    return found


def _scalar_dtype() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
