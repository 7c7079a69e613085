"""A batch norm with its neighbours: the bias of the convolution before, the ReLU and the maximum after.

PointNet's step is memory traffic, and most of it is not products. A batched product with a bias first writes the bias
everywhere and reads it again; a norm in training takes three passes, ReLU two, and in backward they take eight more.
But a norm in training cancels any bias before it: what is left of it is its share of the running mean, and a gradient
of zero. A ReLU whose input nothing else reads needs no pass of its own (`outcore.memory.op_fusion.batch_norm_relu`).
And where only the largest values along the points are wanted, the others need not be normalised (`rules.norm_max`).

So on a GPU the convolution leaves its bias out, and the norm does the rest. What the members compute is the same up to
rounding; for a bias that has no effect, torch's gradient is rounding error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from outcore.fusion.program.call import has_hooks
from outcore.fusion.program.values import Stacked
from outcore.graph import Graph
from outcore.graph.naming import function_name
from outcore.graph.record.recording import Ref, Step
from outcore.memory.op_fusion.batch_norm_relu import norms_of
from outcore.ops.registry import of_layer


@dataclass(frozen=True, slots=True)
class BatchNormChain:
    """The calls of one norm."""

    norm: str
    path: str
    """The path of the norm's module."""
    relu: str | None
    convolution: str | None = None
    bias: str | None = None
    """The name of the convolution's bias, which the norm cancels."""
    largest: str | None = None
    """A maximum along the last dimension, if that is the only reader of the result."""

    @property
    def calls(self) -> tuple[str, ...]:
        """All calls of the chain."""
        return tuple(name for name in (self.convolution, self.norm, self.relu, self.largest) if name is not None)


def chains_of(graph: Graph, steps: Sequence[Step], model: nn.Module) -> dict[str, BatchNormChain]:
    """The chains of a recording, by each of their calls."""
    made = {step.outputs[0]: step for step in steps if step.kind == "module" and len(step.outputs) == 1}
    by_name = {step.name: step for step in steps}
    readers: dict[str, list[str]] = {}
    for name, call in graph.calls.items():
        for value in call.inputs:
            readers.setdefault(value, []).append(name)

    def only_reader(value: str) -> str | None:
        names = readers.get(value, [])
        return names[0] if len(names) == 1 and value not in graph.outputs else None

    found: dict[str, BatchNormChain] = {}
    for norm, relu in norms_of(graph, model).items():
        given = by_name[norm].args[0]
        assert isinstance(given, Ref)
        chain = BatchNormChain(norm, by_name[norm].target, relu)
        before = made.get(given.name) if only_reader(given.name) == norm else None
        if before is not None and _has_bias(model.get_submodule(before.target)):
            chain = replace(chain, convolution=before.name, bias=f"{before.target}.bias")
        (result,) = by_name[relu or norm].outputs
        after = only_reader(result)
        if after is not None and _is_maximum(by_name[after], len(graph.values[result].shape)):
            unread = [name for name in by_name[after].outputs[1:] if name not in readers and name not in graph.outputs]
            if len(unread) == 1:  # where the largest are is not asked: of equal ones we may take another
                chain = replace(chain, largest=after)
        found |= dict.fromkeys(chain.calls, chain)
    return found


def _is_maximum(step: Step, rank: int) -> bool:
    """Whether a step is ``max`` along the positions of ``[samples, channels, positions]``."""
    if step.kind != "function" or function_name(step.target) != "max" or rank != 3:
        return False
    named = dict(zip(("dim", "keepdim"), step.args[1:], strict=False)) | step.kwargs
    return named in ({"dim": 2}, {"dim": -1}, {"dim": 2, "keepdim": False}, {"dim": -1, "keepdim": False})


def _has_bias(module: nn.Module) -> bool:
    op = of_layer(module)
    return op is not None and op.kind == "convolution" and module.bias is not None and not has_hooks(module)


def pays(modules: Sequence[Any], state: Iterable[Any], device: torch.device) -> bool:
    """Whether the members' norms can be one operation that is faster."""
    first = modules[0]
    settings = ("momentum", "eps", "training", "track_running_stats", "affine")
    return (
        device.type == "cuda"
        and first.training
        and first.momentum is not None
        and all(isinstance(value, Stacked) for value in state)
        and all(getattr(m, name) == getattr(first, name) for m in modules[1:] for name in settings)
        and not any(has_hooks(m) for m in modules)
    )
