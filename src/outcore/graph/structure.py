"""Find and replace tensors in whatever a model takes and returns.

Models pass tensors in tuples, dictionaries, dataclasses, Hugging Face outputs and cache objects, and in the closures of
functions handed to `torch.utils.checkpoint`. Two functions cover all of it: `leaves` lists what is found with the path
that leads there, `substitute` rebuilds the same structure around other leaves. A structure whose tensors were replaced
by references is a *template*: filling it again gives the arguments or the result of a replayed call.

Containers that PyTorch's pytree knows are taken apart as it says; other objects by their attributes, and only if there
is something to find inside. Nothing that was passed in is changed.

An image that is read lazily stands in place of a tensor and has its ``shape`` and ``dtype``, and ``read`` for a region
(`outcore.data.Source`); `replace_lazy_images` puts something else there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree

_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.nn.Module,
)
_MAX_DEPTH = 12


def leaves(tree: Any, kind: type | tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """All leaves of a kind with the dotted path that leads to each (empty for the tree itself)."""
    if isinstance(tree, kind):
        yield "", tree
        return
    parts = _open(tree, kind)
    for key, part in zip(parts.keys, parts.values, strict=True) if parts else ():
        for path, leaf in leaves(part, kind):
            yield f"{key}.{path}" if path else key, leaf


def substitute(tree: Any, kind: type | tuple[type, ...], new: Callable[[Any], Any]) -> Any:
    """The same structure with `new(leaf)` in place of each leaf of a kind; shared as it is where there is none."""
    if isinstance(tree, kind):
        return new(tree)
    parts = _open(tree, kind)
    if parts is None:
        return tree
    replaced = [substitute(part, kind, new) for part in parts.values]
    if all(a is b for a, b in zip(parts.values, replaced, strict=True)):
        return tree
    return parts.rebuild(replaced)


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model's parameters and buffers are; the CPU for one without any."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def differentiable(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output that lead back to parameters."""
    return [t for _, t in leaves(output, torch.Tensor) if t.requires_grad and t.is_floating_point()]


def sum_loss(output: Any) -> torch.Tensor:
    """A loss for a model that has none and of which only time and memory count: the sum of all outputs."""
    return torch.stack([t.float().sum() for t in differentiable(output)]).sum()


def square_loss(output: Any) -> torch.Tensor:
    """A loss for a model that has none and whose gradients count: the mean square of every output, added up."""
    return torch.stack([t.float().square().mean() for t in differentiable(output)]).sum()


def replace_lazy_images(arguments: Any, new: Callable[[Any], Any]) -> Any:
    """The arguments with what `new` makes of every lazily read image in their tuples, lists and dictionaries."""
    if not isinstance(arguments, torch.Tensor) and all(hasattr(arguments, a) for a in ("shape", "dtype", "read")):
        return new(arguments)
    if isinstance(arguments, (tuple, list)):
        replaced = [replace_lazy_images(part, new) for part in arguments]
        return arguments._make(replaced) if hasattr(arguments, "_make") else type(arguments)(replaced)
    if isinstance(arguments, dict):
        return {name: replace_lazy_images(part, new) for name, part in arguments.items()}
    return arguments


def has_lazy_images(arguments: Any) -> bool:
    """Whether one of the arguments is an image that is read lazily."""
    found: list[Any] = []
    replace_lazy_images(arguments, found.append)
    return bool(found)


class _Parts:
    """One level of a structure: names, values, and how to put it together again."""

    __slots__ = ("keys", "rebuild", "values")

    def __init__(self, keys: list[str], values: list[Any], rebuild: Callable[[list[Any]], Any]) -> None:
        self.keys, self.values, self.rebuild = keys, values, rebuild


def _open(tree: Any, kind: type | tuple[type, ...], depth: int = 0) -> _Parts | None:
    cls = type(tree)
    if cls is tuple or cls is list:
        return _Parts([str(i) for i in range(len(tree))], list(tree), cls)
    if cls is dict:
        keys = list(tree)
        return _Parts([str(k) for k in keys], list(tree.values()), lambda new: dict(zip(keys, new, strict=True)))
    if isinstance(tree, _ATOMS):
        return None
    if cls is slice:
        return _Parts(["start", "stop", "step"], [tree.start, tree.stop, tree.step], lambda new: slice(*new))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return _Parts([str(name) for name in tree._fields], list(tree), cls._make)
    if cls in pytree.SUPPORTED_NODES:
        return _open_pytree(tree, pytree.SUPPORTED_NODES[cls])
    if isinstance(tree, functools.partial):
        inside = [tree.func, tree.args, tree.keywords]
        return _Parts(["func", "args", "keywords"], inside, lambda new: functools.partial(new[0], *new[1], **new[2]))
    if isinstance(tree, FunctionType):
        return _open_closure(tree)
    if isinstance(tree, (set, frozenset)) or depth > _MAX_DEPTH:
        return None
    return _open_object(tree, kind, depth)


def _open_pytree(tree: Any, node: pytree.NodeDef) -> _Parts:
    values, context = node.flatten_fn(tree)
    keys = [str(key) for key in (tree if isinstance(tree, dict) else range(len(values)))]
    return _Parts(keys, list(values), lambda new: node.unflatten_fn(new, context))


def _open_closure(function: FunctionType) -> _Parts | None:
    """A function closes over variables; with other contents it is another function of the same code."""
    cells = function.__closure__ or ()
    try:
        contents = [cell.cell_contents for cell in cells]
    except ValueError:  # a variable not yet assigned
        return None
    if not contents:
        return None

    def rebuild(new: list[Any]) -> FunctionType:
        made = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(CellType(c) for c in new),
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    # Only tensors and tuples or lists of them are looked for: a closure may hold the whole program.
    shallow = [c if isinstance(c, (torch.Tensor, tuple, list)) or _is_template(c) else None for c in contents]
    keys = list(function.__code__.co_freevars)
    return _Parts(
        keys,
        shallow,
        lambda new: rebuild([c if s is n else n for c, s, n in zip(contents, shallow, new, strict=True)]),
    )


def _is_template(content: Any) -> bool:
    return type(content).__module__ == "outcore.graph.record.recording"


def _open_object(tree: Any, kind: type | tuple[type, ...], depth: int) -> _Parts | None:
    """An object of a class we know nothing of: look through its attributes, and only if something is there."""
    attributes = getattr(tree, "__dict__", None)
    if not attributes or isinstance(tree, BaseException) or type(tree).__module__ in ("builtins", "types", "typing"):
        return None
    if not any(_reaches(value, kind, depth + 1, id(tree)) for value in attributes.values()):
        return None

    def rebuild(new: list[Any]) -> Any:
        made = object.__new__(type(tree))
        made.__dict__.update(zip(attributes, new, strict=True))
        return made

    return _Parts(list(attributes), list(attributes.values()), rebuild)


def _reaches(tree: Any, kind: type | tuple[type, ...], depth: int, around: int) -> bool:
    """Whether a leaf of a kind is within reach of a value; every object on the way is looked into once.

    Args:
        tree: a value.
        kind: of the leaf.
        depth: of the value in the structure, whose depth is bounded.
        around: the identity of the object that holds it.
    """
    seen, level = {around}, [tree]
    while level and depth <= _MAX_DEPTH + 1:
        inside: list[Any] = []
        for one in level:
            if isinstance(one, kind):
                return True
            if isinstance(one, (*_ATOMS, FunctionType)) or id(one) in seen:
                continue
            seen.add(id(one))
            if isinstance(one, (tuple, list)):
                inside += one
            else:
                inside += (one if isinstance(one, dict) else getattr(one, "__dict__", {})).values()
        level, depth = inside, depth + 1
    return False
