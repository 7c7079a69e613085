"""One recorded step, about to run for all members at once.

A rule gets a `FusedCall`: the arguments with stacked values in them, the members' modules where the step is a module,
and the ways to run it that are always right: once for all where nothing differs, by `torch.func.vmap`, or member by
member. vmap is only taken where every operation has a batching rule of its own; where one has not, or the step reads
data, the members run one after the other.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap

from outcore.fusion.program.values import Stacked, is_stacked, member_of, stack_results
from outcore.graph.structure import leaves, substitute


class MemberRandomness:
    """Where random numbers come from: one generator for all, or one per member that repeats a serial run's.

    With seeds, what a member draws on a CPU is bitwise what a serial run draws after ``torch.manual_seed(seed)``.
    """

    def __init__(self, seeds: Sequence[int] | None) -> None:
        self.states: list[torch.Tensor] | None = None
        self.cuda_states: list[list[torch.Tensor]] | None = None
        if seeds is not None:
            self.states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
            if torch.cuda.is_initialized():
                devices = range(torch.cuda.device_count())
                made = [[torch.Generator(f"cuda:{d}").manual_seed(s).get_state() for d in devices] for s in seeds]
                self.cuda_states = made

    def only(self, slots: Sequence[int]) -> MemberRandomness:
        """The same for some of the members, each at its position in its stream."""
        made = MemberRandomness(None)
        made.states = None if self.states is None else [self.states[slot] for slot in slots]
        made.cuda_states = None if self.cuda_states is None else [self.cuda_states[slot] for slot in slots]
        return made

    def reseed(self, slot: int, seed: int) -> None:
        """Restart a member's stream."""
        fresh = MemberRandomness([seed])
        if self.states is not None and fresh.states is not None:
            self.states[slot] = fresh.states[0]
        if self.cuda_states is not None and fresh.cuda_states is not None:
            self.cuda_states[slot] = fresh.cuda_states[0]

    @property
    def per_member(self) -> bool:
        """Whether every member has its own stream."""
        return self.states is not None

    @contextlib.contextmanager
    def of(self, slot: int) -> Iterator[None]:
        """A context in which numbers are drawn from a member's own stream."""
        if self.states is None:
            yield
            return
        before = torch.get_rng_state()
        torch.set_rng_state(self.states[slot])
        on_gpu = torch.cuda.get_rng_state_all() if self.cuda_states is not None else []
        if self.cuda_states is not None:
            torch.cuda.set_rng_state_all(self.cuda_states[slot])
        try:
            yield
        finally:
            self.states[slot] = torch.get_rng_state()
            torch.set_rng_state(before)
            if self.cuda_states is not None:
                self.cuda_states[slot] = torch.cuda.get_rng_state_all()
                torch.cuda.set_rng_state_all(on_gpu)


@dataclass(slots=True)
class FusedCall:
    """A step with its arguments, and the safe ways to run it."""

    name: str
    members: int
    first: int
    """Slot of the first member that takes part."""
    target: Any
    """The function; for a module the class."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modules: tuple[nn.Module, ...] = ()
    """The members' modules, where the step is one."""
    state: Mapping[str, Stacked | torch.Tensor | None] = field(default_factory=dict)
    """The module's parameters and buffers by their names in it; None where it is to run without."""
    per_member_args: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] | None = None
    """Arguments of each member where numbers in them differ; stacked values in all of them."""
    randomness: MemberRandomness = field(default_factory=lambda: MemberRandomness(None))
    ways: dict[str, str] = field(default_factory=dict)
    """How each step was run; what failed under vmap once is not tried again."""
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    """Small tensors a rule makes once: a captured CUDA graph cannot copy numbers from the host."""
    written: frozenset[str] = frozenset()
    """Names of values that a later step writes in place."""
    outputs: tuple[str, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The first member's module."""
        return self.modules[0]

    @property
    def varies(self) -> bool:
        """Whether anything differs from member to member."""
        return (
            self.per_member_args is not None
            or is_stacked((self.args, self.kwargs))
            or any(isinstance(s, Stacked) for s in self.state.values())
        )

    def same(self, *attributes: str) -> bool:
        """Whether all members' modules agree in these attributes."""
        return all(getattr(m, a) == getattr(self.modules[0], a) for m in self.modules[1:] for a in attributes)

    def note(self, way: str) -> None:
        """Record how the step was run."""
        self.ways[self.name] = way

    def once(self) -> Any:
        """Run it once for all, since nothing differs."""
        self.note("shared")
        return self._run(self.args, self.kwargs, 0, dict(self.state))

    def batched(self) -> Any:
        """By vmap where that is right, else member by member."""
        if self.ways.get(self.name) == "members" or self.per_member_args is not None or not self.alike():
            return self.one_by_one()
        kept = {n: s.tensor.clone() for n, s in self._buffers().items()} if self.name not in self.ways else {}
        try:
            result = self._vmapped()
        except Exception:
            if self.ways.get(self.name) == "vmap":
                raise
            with torch.no_grad():
                for name, content in kept.items():
                    self._buffers()[name].tensor.copy_(content)
            return self.one_by_one()
        self.note("vmap")
        return result

    def one_by_one(self) -> Any:
        """Every member by itself, on slices of the stacked tensors."""
        self.note("members")
        with rnn_weights_anywhere():
            return self._each()

    def _each(self) -> Any:
        results = []
        for b in range(self.members):
            args, kwargs = self.per_member_args[b] if self.per_member_args is not None else (self.args, self.kwargs)
            args, kwargs = member_of((args, kwargs), b)
            if self._writes:
                args, kwargs = substitute((args, kwargs), torch.Tensor, torch.clone)
            state = {n: s.tensor[b] if isinstance(s, Stacked) else s for n, s in self.state.items()}
            with self.randomness.of(self.first + b):
                results.append(self._run(args, kwargs, b, state))
        return stack_results(results)

    @property
    def _writes(self) -> bool:
        """Whether the module works in place: one member's must not write into what belongs to all."""
        return any(getattr(m, "inplace", False) for module in self.modules for m in module.modules())

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], slot: int, state: Mapping[str, Any]) -> Any:
        if self.modules:
            return functional_call(self.modules[slot], dict(state), args, kwargs)
        return self.target(*args, **kwargs)

    def _vmapped(self) -> Any:
        stacked = [s.tensor for _, s in leaves((self.args, self.kwargs, dict(self.state)), Stacked)]
        shape: list[Any] = []

        def one(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found = iter(tensors)
            args, kwargs, state = substitute((self.args, self.kwargs, dict(self.state)), Stacked, lambda _: next(found))
            result = self._run(args, kwargs, 0, state)
            made = [t for _, t in leaves(result, torch.Tensor)]
            shape[:] = [substitute(result, torch.Tensor, _blank)]
            return tuple(made)

        with _no_slow_batching():
            made = iter(vmap(one, randomness="error")(*stacked))
        return substitute(shape[0], _Blank, lambda _: Stacked(next(made)))

    def _buffers(self) -> dict[str, Stacked]:
        return {n: s for n, s in self.state.items() if isinstance(s, Stacked) and not s.tensor.requires_grad}

    def alike(self) -> bool:
        """Whether one member's module can be used for all."""
        return not self.modules or (
            not has_hooks(self.modules[0]) and all(settings(m) == settings(self.modules[0]) for m in self.modules[1:])
        )


class _Blank:
    """A placeholder of a tensor."""


def _blank(_: torch.Tensor) -> _Blank:
    return _Blank()


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs more than its forward."""
    return any(
        bool(getattr(m, name))
        for m in module.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def settings(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module: what its forward may read beside tensors and other modules."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if not name.startswith(("_parameters", "_buffers", "_modules", "_non_persistent", "_flat_weight"))
        and not isinstance(value, torch.Tensor)
        and "hook" not in name
    }


@contextlib.contextmanager
def _no_slow_batching() -> Iterator[None]:
    """Raise instead of falling back to vmap's own loop over samples: ours is as fast, and is reported."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


@contextlib.contextmanager
def rnn_weights_anywhere() -> Iterator[None]:
    """A context without cuDNN's warning that recurrent weights, here slices, are not contiguous and are copied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield
