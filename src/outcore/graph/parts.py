"""What a graph is made of: blocks, calls and values.

A *block* is one of the user's modules, or a function that a module's ``forward`` calls between modules. A *call* is one
execution of a leaf block; a *value* is a tensor that flows between calls. Names are built from the user's own module
paths, so they are the same on another machine, another torch version, another batch size, in train and in eval mode:

    layer1.0.conv1          a block: the module ``model.layer1[0].conv1``
    layer1.0.add()          a block: the function ``add`` as called by ``layer1.0``
    layer1.0.conv1#0        the first call of that block
    layer1.0.conv1#0:out    the tensor this call returns; of several: ``lstm#0:0``, ``lstm#0:1.0``, ``head#0:logits``
    x                       an input, named after the argument of ``forward``
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ROOT = ""
"""The path of the whole model."""

OUTLIVES = ""
"""In place of a call: a value is held longer than ``forward`` runs."""

BlockKind = Literal["container", "module", "function", "opaque"]
"""A container has blocks inside; the others are leaves: a torch.nn layer, a function, or a part that must stay whole
(a scripted or compiled module, a checkpointed region, a custom autograd function, a hook)."""


@dataclass(frozen=True, slots=True)
class Block:
    """One of the user's modules, or a function called between them."""

    path: str
    kind: BlockKind
    type: str
    """Class name of the module or name of the function."""
    detail: str
    """What ``print(module)`` shows between the brackets."""
    children: tuple[str, ...]
    """Paths of the blocks inside, in the order of their first call; never-called ones last."""
    calls: int
    parameters: int
    """Number of parameter elements in the block and all blocks inside it, shared ones once."""
    source: str
    """``file:line`` of the call (of the first, if there are several); of ``forward`` itself for the whole model."""
    aliases: tuple[str, ...] = ()
    """Other paths under which the same module is registered."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def depth(self) -> int:
        """0 for the whole model, 1 for its children."""
        return 0 if self.path == ROOT else self.path.count(".") + 1


@dataclass(frozen=True, slots=True)
class Call:
    """One execution of a leaf block."""

    name: str
    block: str
    inputs: tuple[str, ...]
    """Names of the values it reads, each once, in argument order."""
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    """State-dict names of the parameters and buffers it reads."""
    mutates: tuple[str, ...]
    """Names of the values whose memory it writes: they must not be used elsewhere as if unchanged."""
    after: tuple[str, ...]
    """Calls that must come first although no value says so (one reads memory that the other overwrites)."""
    scope: tuple[str, ...]
    """Calls of the containers it happens in, outermost first: ``("layer1#0", "layer1.0#0")``."""
    source: str
    detail: str
    """The arguments that are not tensors."""
    grad: bool
    """Whether autograd was recording (false inside the model's own ``torch.no_grad()``)."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that flows between calls."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    bytes: int
    requires_grad: bool
    producer: str | None
    """Name of the call that makes it; none for an input of the model."""
    consumers: tuple[str, ...]
    alias_of: str | None
    """The earlier value whose memory it shares (a view, or the result of an in-place operation)."""
    held_until: str | None = field(default=None, compare=False)
    """The last call that runs while Python holds the tensor (a variable of ``forward``, a list, the arguments of a
    module that is still running), where that is later than its last use; `OUTLIVES` where an attribute, or a list
    outside of ``forward``, holds it. None in a part of a graph, which no code of the user's runs."""

    @property
    def base(self) -> str:
        """The first value in the memory it lies in: itself, unless it is a view or the result of an in-place write."""
        return self.alias_of or self.name


def parent(path: str) -> str:
    """Path of the block that a block is in: ``parent("layer1.0.conv1") == "layer1.0"``."""
    return path.rpartition(".")[0]


def ancestors(path: str) -> list[str]:
    """Paths of the blocks around a block, outermost first, without the whole model and the block itself."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]
