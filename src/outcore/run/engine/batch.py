"""Batches: what a step is given, cut into micro-batches, and described to ranks that were not given it.

Inputs and targets are whatever the user's model and loss take: tensors in tuples, lists and dictionaries. Tensors whose
first dimension is that of the batch (of the first tensor of the inputs) are cut along it, the others go whole to every
micro-batch. Parts differ in size by at most one row, larger ones first.

A rank that holds only middle stages needs shapes, not data. `describe` turns a batch into plain JSON, `meta_batch`
makes meta tensors of it.

A slide or another source may stand in place of a tensor. For everything that is agreed on between ranks it is a tensor
without content, of its shape and dtype (`stand_ins`). Where the image is shared by a grid of ranks each reads the
region that its part needs, when its forward begins; where a rank needs the whole of it, all is read at once
(`in_memory`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from outcore.data import Source
from outcore.errors import EngineError
from outcore.graph.structure import leaves, replace_lazy_images, substitute
from outcore.stream.source import ImageRows, StreamedImage, image_of

_PLAIN = (int, float, bool, str, type(None))
Images = dict[int, StreamedImage]
"""By the id of the tensor that stands for it."""


def rows(inputs: Any) -> int:
    """How many samples a batch has: the first dimension of its first tensor."""
    for _, tensor in leaves(inputs, torch.Tensor):
        if tensor.ndim:
            return int(tensor.shape[0])
    raise EngineError("the batch has no tensor with a first dimension to cut; give inputs with the samples in it")


def parts(count: int, pieces: int) -> list[int]:
    """Sizes of micro-batches.

    >>> parts(10, 4)
    [3, 3, 2, 2]
    """
    return [count // pieces + (i < count % pieces) for i in range(pieces)]


def cut(batch: Any, count: int, sizes: Sequence[int]) -> list[Any]:
    """A batch of `count` samples as micro-batches of the given sizes."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]

    def rows_of(tensor: torch.Tensor, end: int, size: int) -> torch.Tensor:
        return tensor[end - size : end] if tensor.ndim and tensor.shape[0] == count else tensor

    return [
        substitute(batch, torch.Tensor, partial(rows_of, end=end, size=size))
        for end, size in zip(ends, sizes, strict=True)
    ]


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs of micro-batches as one: tensors are concatenated along the first dimension."""
    columns = [[t for _, t in leaves(output, torch.Tensor)] for output in outputs]
    whole = iter([torch.cat(row) if row[0].ndim else torch.stack(row) for row in zip(*columns, strict=True)])
    return substitute(outputs[0], torch.Tensor, lambda _: next(whole))


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as the arguments of ``forward``: a dictionary by name, a tuple or list by position, else the only one."""
    if isinstance(inputs, dict):
        return (), inputs
    if type(inputs) in (tuple, list):
        return tuple(inputs), {}
    return (inputs,), {}


def tensors_of(inputs: Any) -> list[torch.Tensor]:
    """The tensors of inputs, in the order in which a graph names them."""
    return [t for _, t in leaves(arguments(inputs), torch.Tensor)]


def describe(batch: Any) -> Any:
    """A batch as plain JSON: tensors by shape, stride and dtype."""
    if isinstance(batch, torch.Tensor):
        return {"tensor": [list(batch.shape), list(batch.stride()), str(batch.dtype).removeprefix("torch.")]}
    if isinstance(batch, dict):
        return {"dict": [[str(k), describe(v)] for k, v in batch.items()]}
    if type(batch) in (tuple, list):
        return {"tuple" if type(batch) is tuple else "list": [describe(v) for v in batch]}
    if isinstance(batch, _PLAIN):
        return {"plain": batch}
    return {"object": f"{type(batch).__module__}.{type(batch).__qualname__}"}


def difference(one: Any, other: Any, place: str = "inputs") -> str | None:
    """Where two descriptions differ first, and how: ``inputs[1]: float32 8x3 and float64 8x3``.

    >>> difference(describe((torch.ones(2), None)), describe((torch.ones(2), 3)))
    'inputs[1]: None and 3'
    """
    ((kind, here),), ((other_kind, there),) = one.items(), other.items()
    if kind == other_kind == "dict":
        keys, other_keys = [k for k, _ in here], [k for k, _ in there]
        if keys != other_keys:
            return f"{place}: names {', '.join(keys)} and {', '.join(other_keys)}"
        pairs = [(f"{place}[{k!r}]", a, b) for (k, a), (_, b) in zip(here, there, strict=True)]
    elif kind == other_kind and kind in ("tuple", "list"):
        if len(here) != len(there):
            return f"{place}: a {kind} of {len(here)} and one of {len(there)}"
        pairs = [(f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(here, there, strict=True))]
    else:
        shown, other_shown = _in_words(one), _in_words(other)
        if shown == other_shown and one != other:
            shown, other_shown = f"strides {here[1]}", f"strides {there[1]}"
        return None if one == other else f"{place}: {shown} and {other_shown}"
    return next((text for where, a, b in pairs if (text := difference(a, b, where))), None)


def _in_words(description: Any) -> str:
    ((kind, content),) = description.items()
    if kind == "tensor":
        return f"{content[2]} {'x'.join(map(str, content[0])) or 'number'}"
    return repr(content) if kind == "plain" else content if kind == "object" else f"a {kind}"


def meta_batch(description: Any) -> Any:
    """A batch of meta tensors from its description."""
    ((kind, content),) = description.items()
    match kind:
        case "tensor":
            shape, stride, dtype = content
            return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
        case "dict":
            return {key: meta_batch(value) for key, value in content}
        case "tuple":
            return tuple(meta_batch(value) for value in content)
        case "list":
            return [meta_batch(value) for value in content]
        case "plain":
            return content
        case _:
            raise EngineError(
                f"the batch holds a {content}, which ranks without data cannot know; give it to all ranks"
            )


def fingerprint(description: Any) -> int:
    """A number that is the same for batches of the same form, on every rank."""
    text = json.dumps(description, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def stand_ins(inputs: Any) -> tuple[Any, Images]:
    """The inputs with a tensor without content in place of every source, and which stands for what."""
    images: Images = {}

    def stand_in(source: Source) -> torch.Tensor:
        image = image_of(source)
        made = torch.empty(image.shape, dtype=image.dtype, device="meta")
        images[id(made)] = image
        return made

    return replace_lazy_images(inputs, stand_in), images


def in_memory(inputs: Any) -> Any:
    """The inputs with every source read."""

    def whole(source: Source) -> torch.Tensor:
        image = image_of(source)
        return ImageRows(image, 0, image.shape[0]).to(torch.device("cpu"))

    return replace_lazy_images(inputs, whole)


def rows_of_sources(targets: Any, count: int, first: int, size: int) -> Any:
    """The targets of a micro-batch with some samples of a source in place of every source of a batch of `count`; they
    are read where the loss is taken."""

    def rows(source: Source) -> ImageRows:
        image = image_of(source)
        begin, end = (first, first + size) if image.shape[0] == count else (0, image.shape[0])
        return ImageRows(image, begin, end)

    return replace_lazy_images(targets, rows)
