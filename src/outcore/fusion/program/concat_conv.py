"""A 1x1 convolution of concatenated maps, without concatenating them.

To give every point the features of its cloud beside its own, a network repeats them for all points, concatenates both
along the channels and convolves: most of what is then stored, read and multiplied is the same numbers again and again.
But a 1x1 convolution of concatenated maps is the sum of those of the parts, and that of a repeated part need be
computed once. So where the only reader of a ``cat`` is such a convolution and a part is repeated, the parts stay
separate (`outcore.fusion.rules.matmul.pointwise_joined`). The sums are the same in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from outcore.fusion.program.call import has_hooks
from outcore.graph import Graph
from outcore.graph.naming import function_name
from outcore.graph.record.recording import Ref, Step
from outcore.ops.registry import names


def joins_of(graph: Graph, steps: Sequence[Step], model: nn.Module) -> dict[str, str]:
    """Calls of ``cat`` along the channels, and the 1x1 convolution that is the only reader of each."""
    readers: dict[str, list[str]] = {}
    for name, call in graph.calls.items():
        for value in call.inputs:
            readers.setdefault(value, []).append(name)
    by_name = {step.name: step for step in steps}
    found: dict[str, str] = {}
    for step in steps:
        if not _joins_channels(step) or step.outputs[0] in graph.outputs:
            continue
        reading = readers.get(step.outputs[0], [])
        after = by_name.get(reading[0]) if len(reading) == 1 else None
        if after is not None and after.kind == "module" and _is_pointwise(model.get_submodule(after.target)):
            found[step.name] = after.name
    return found


def _joins_channels(step: Step) -> bool:
    if step.kind != "function" or function_name(step.target) not in names("cat"):
        return False
    named = dict(zip(("tensors", "dim"), step.args, strict=False)) | step.kwargs
    parts = named.get("tensors", ())
    return named.keys() == {"tensors", "dim"} and named["dim"] == 1 and all(isinstance(part, Ref) for part in parts)


def _is_pointwise(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) or has_hooks(module):
        return False
    plain = module.padding in ("same", "valid") or not any(module.padding)
    return plain and {*module.kernel_size, *module.stride, module.groups} == {1}
