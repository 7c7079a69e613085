"""The parameters and buffers of many models of one architecture, stacked.

For each parameter of the architecture there is one leaf tensor of shape ``[members, ...]``. The members' own
parameters and buffers become views of their slice: the user's modules stay alive, ``models[3].state_dict()`` is
current at any moment, ``load_state_dict`` writes into the stack, and a torch optimizer on a member's parameters steps
its slice. What is equal memory in one model (tied weights) is one stacked tensor under several names.

Invariant: between steps, ``models[b].<name>`` and ``stack[name][b]`` are the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outcore.errors import FuseError
from outcore.graph.strides import has_known_format


class Stack:
    """The state of all members, by the names of the user's own state_dict."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = list(models)
        self.parameters: dict[str, torch.Tensor] = {}
        """Stacked leaves by the first name of each parameter."""
        self.buffers: dict[str, torch.Tensor] = {}
        self.names: dict[str, str] = {}
        """Every name, also of tied tensors, with the first one."""
        self.owners: dict[int, tuple[str, int]] = {}
        """Identity of a member's own parameter -> its stacked tensor and slot."""
        self.tensors: list[dict[str, torch.Tensor]] = []
        """The members' own tensors by their first names."""
        self.flat: dict[torch.dtype, torch.Tensor] = {}
        """The memory of all trained parameters of a dtype."""
        self._lookups: dict[int, list[tuple[dict[str, Any], str, str]]] = {}
        """Identity of a model -> the dictionaries in which its tensors are looked up."""
        self._adopted: set[int] = set()
        """Parameters of a single member that stay where they are: cuDNN wants a recurrent layer's in one piece."""
        self.places: dict[str, int] = {}
        """Where in it each begins."""
        self._check_same()
        if len(self.models) == 1:
            for module in self.models[0].modules():
                if isinstance(module, nn.RNNBase) and next(module.parameters()).is_cuda:
                    module.flatten_parameters()
                    self._adopted |= {id(p) for p in module.parameters()}
        with torch.no_grad():
            self._build()

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The stacked tensor of that name."""
        first = self.names[name]
        return self.parameters[first] if first in self.parameters else self.buffers[first]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def member(self, name: str, slot: int) -> torch.Tensor:
        """A member's own parameter or buffer."""
        return self.tensors[slot][self.names[name]]

    def put(self, slot: int, model: nn.Module) -> None:
        """Take another model of the same architecture into a slot."""
        self._check_pair(self.models[0] if slot else self.models[-1], model, slot)
        self._release(slot)
        with torch.no_grad():
            for name, tensor in _first(model):
                self[name].detach()[slot].copy_(tensor)
                self._bind(name, slot, tensor)
        self._lookups.pop(id(self.models[slot]), None)
        self.models[slot], self.tensors[slot] = model, dict(_first(model))

    def adopt(self) -> bool:
        """Copy buffers that were assigned to members since into the stack; returns whether there were any."""
        found = False
        for slot, model in enumerate(self.models):
            lookups = self._lookups.get(id(model))
            if lookups is None:
                lookups = self._lookups[id(model)] = [(*_lookup(model, name), name) for name in self.tensors[slot]]
            for store, leaf, name in lookups:
                tensor, known = store.get(leaf), self.tensors[slot][name]
                if tensor is known:
                    continue
                if tensor is None or tensor.shape != known.shape or isinstance(known, nn.Parameter):
                    raise FuseError(
                        f"model {slot}: {name} was replaced since the models were fused; write into it instead: "
                        f"{name}.copy_(value), or fuse anew"
                    )
                with torch.no_grad():
                    self[name].detach()[slot].copy_(tensor)
                    self._bind(name, slot, tensor)
                self.tensors[slot][name] = tensor
                found = True
        return found

    def release(self) -> None:
        """Give every member memory of its own again."""
        for slot in range(len(self)):
            self._release(slot)

    def _release(self, slot: int) -> None:
        for _, tensor in _first(self.models[slot]):
            self.owners.pop(id(tensor), None)
            tensor.data = tensor.data.clone()
            tensor.grad = None

    def _build(self) -> None:
        members = self.tensors = [dict(_first(model)) for model in self.models]
        canonical = {id(t): name for name, t in members[0].items()}
        self.names = {name: canonical[id(t)] for name, t in _named(self.models[0]).items()}
        self._allocate(members[0])
        for name in members[0]:
            for slot, member in enumerate(members):
                if id(member[name]) in self._adopted:
                    self.owners[id(member[name])] = (name, slot)
                    continue
                self[name].detach()[slot].copy_(member[name])
                self._bind(name, slot, member[name])

    def _allocate(self, first: Mapping[str, torch.Tensor]) -> None:
        """Allocate everything, each member's slice in the layout of the member's own; trained parameters in one
        piece."""
        members = len(self)
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for name, tensor in first.items():
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and id(tensor) not in self._adopted:
                kind = (tensor.dtype, tensor.device)
                self.places[name] = sizes.get(kind, 0)
                sizes[kind] = self.places[name] + -(-members * tensor.numel() // _ALIGNMENT) * _ALIGNMENT
        for (dtype, device), size in sizes.items():
            self.flat[dtype] = torch.zeros(size, dtype=dtype, device=device)
        for name, tensor in first.items():
            shape = (members, *tensor.shape)
            strides = (tensor.numel(), *_dense_strides(tensor))
            if name in self.places:
                # Not a view: autograd asks more of views than of tensors that happen to share memory.
                memory = self.flat[tensor.dtype].untyped_storage()
                leaf = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                self.parameters[name] = leaf.set_(memory, self.places[name], shape, strides).requires_grad_()
                continue
            if id(tensor) in self._adopted:
                made = tensor.detach().unsqueeze(0).requires_grad_(tensor.requires_grad)
            else:
                made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
            (self.parameters if isinstance(tensor, nn.Parameter) else self.buffers)[name] = made

    def _bind(self, name: str, slot: int, tensor: torch.Tensor) -> None:
        tensor.data = self[name].detach()[slot]
        tensor.grad = None
        if isinstance(tensor, nn.Parameter):
            self.owners[id(tensor)] = (name, slot)

    def _check_same(self) -> None:
        seen: dict[int, int] = {}
        for slot, model in enumerate(self.models):
            if slot:
                self._check_pair(self.models[0], model, slot)
            for name, tensor in _first(model):
                if (other := seen.setdefault(id(tensor), slot)) != slot:
                    raise FuseError(
                        f"models {other} and {slot} share {name}; members train independently, so each needs its own: "
                        "build every model anew, or copy.deepcopy it"
                    )

    @staticmethod
    def _check_pair(a: nn.Module, b: nn.Module, slot: int) -> None:
        ours, theirs = dict(_first(a)), dict(_first(b))
        if ours.keys() != theirs.keys():
            odd = sorted(ours.keys() ^ theirs.keys())[0]
            raise FuseError(
                f"model {slot} is of another architecture: {odd} is in one and not the other; fuse models of one "
                "architecture together, and others in another call"
            )
        for name, tensor in theirs.items():
            facts = [(tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in (ours[name], tensor)]
            if facts[0] != facts[1]:
                raise FuseError(
                    f"model {slot}: {name} is {facts[1][0]} {facts[1][1]} on {facts[1][2]}, the others have "
                    f"{facts[0][0]} {facts[0][1]} on {facts[0][2]} (trained: {facts[1][3]} and {facts[0][3]}); "
                    "fuse models of equal shapes together"
                )


_ALIGNMENT = 64
"""Elements: every stacked parameter begins at a multiple, as memory of its own would."""


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor of this shape in the same memory format."""
    if has_known_format(tensor) and not tensor.is_contiguous():
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def _lookup(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary of a module that a parameter or buffer is in, and its name there."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _first(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor once, under its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
