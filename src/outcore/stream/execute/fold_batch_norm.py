"""Batch norms with frozen statistics, folded.

In eval mode a batch norm is one multiplication and one addition per channel, with numbers that depend on parameters
and buffers alone. After a convolution they fold into its weight and bias:

    norm(conv(x, w) + b) = conv(x, w * scale) + (b * scale + shift)      scale = weight / sqrt(var + eps)
                                                                         shift = bias - mean * scale

The folded weight is computed once per step from the user's parameters, by autograd, so that convolution weight, norm
weight and norm bias all get their exact gradients, from the gradient of the folded weight: no pass over the pixels is
needed for the norm, forward or backward, and its input, half of what a ResNet keeps, is never kept. Elsewhere the
scale and shift are computed once and applied as one fused multiply-add. Grade: ``reassociated``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace

import torch

from outcore.graph.record.recording import Ref
from outcore.ops.registry import names
from outcore.stream.network import RegionNetwork, RegionNode
from outcore.stream.rules.convolve import ConvolutionRule, Finished
from outcore.stream.rules.normalise import Affine, Frozen
from outcore.stream.rules.pointwise import Pointwise


def fold(network: RegionNetwork) -> None:
    """Replace the frozen batch norms of a network, in place."""
    uses = Counter(v for n in network.nodes.values() for v in n.values)
    uses.update(network.graph.outputs)
    nodes: dict[str, RegionNode] = {}
    gone: set[str] = set()
    for node in network.nodes.values():
        frozen = node.rule
        if not isinstance(frozen, Frozen):
            nodes[node.output] = node
            continue
        before = nodes.get(node.operands[0].name)
        if (
            before is not None
            and isinstance(before.rule, ConvolutionRule)
            and uses[before.output] == 1
            and before.call not in network.contexts
            and all(r.kind == "state" for r in before.operands[1:])
        ):
            made = _folded(network, before, node, frozen)
            gone.add(before.output)
        else:
            made = _affine(network, node, frozen)
        nodes.update((n.output, n) for n in made)
    network.nodes = {name: n for name, n in nodes.items() if name not in gone}


def finish(network: RegionNetwork) -> None:
    """Join folded convolutions with the sums and ReLUs that follow them, in place."""
    uses = Counter(v for n in network.nodes.values() for v in n.values)
    uses.update(network.graph.outputs)
    nodes = dict(network.nodes)
    for node in network.nodes.values():
        if node.kind != "local" or node.call in network.contexts:
            continue
        type_ = network.graph.blocks[network.graph.calls[node.call].block].type
        before = nodes.get(node.operands[0].name) if node.operands[0].kind == "value" else None
        if before is None or not isinstance(rule := before.rule, ConvolutionRule) or uses[before.output] != 1:
            continue
        if not before.absorbed or (isinstance(rule, Finished) and rule.relu):
            continue  # not folded, or already at its end
        made = (
            Finished(**{f.name: getattr(rule, f.name) for f in fields(ConvolutionRule)})
            if type(rule) is ConvolutionRule
            else rule
        )
        if type_ in _RELU and isinstance(made, Finished):
            joined = replace(made, relu=True)
        elif _adds(node, type_) and isinstance(made, Finished) and not made.residual:
            joined = replace(
                made, residual=True, operands=(*made.operands, node.operands[1]), shapes=(*made.shapes, node.shape)
            )
        else:
            continue
        del nodes[before.output]
        # The place of the later node: whatever is added must be there.
        nodes[node.output] = replace(
            node, operands=joined.operands, rule=joined, absorbed=(*before.absorbed, before.call)
        )
    network.nodes = {name: nodes[name] for name in network.nodes if name in nodes}


_RELU = names("relu")


def _adds(node: RegionNode, type_: str) -> bool:
    """Whether a node is the sum of two images of one shape."""
    rule = node.rule
    return (
        type_ in ("add", "add_")
        and isinstance(rule, Pointwise)
        and len(node.operands) == 2
        and node.operands[1].kind == "value"
        and all(s == node.shape for s in rule.shapes)
    )


def _folded(network: RegionNetwork, conv: RegionNode, norm: RegionNode, frozen: Frozen) -> list[RegionNode]:
    assert isinstance(conv.rule, ConvolutionRule)
    statistics = norm.operands[1:]
    count = len(statistics)
    weight = conv.operands[1]

    def scaled_weight(*tensors: torch.Tensor) -> torch.Tensor:
        scale, _ = frozen.scale_and_shift(*tensors[:count])
        w = tensors[count]
        return (w * scale.reshape(-1, *(1,) * (w.dim() - 1))).to(w.dtype)

    def shifted_bias(*tensors: torch.Tensor) -> torch.Tensor:
        scale, shift = frozen.scale_and_shift(*tensors[:count])
        bias = tensors[count] * scale + shift if len(tensors) > count else shift
        return bias.to(network.state(weight).dtype)

    new_weight = _global(network, norm, "weight", (*statistics, weight), scaled_weight, conv.rule.shapes[1])
    new_bias = _global(network, norm, "bias", (*statistics, *conv.operands[2:]), shifted_bias, (norm.shape[1],))
    operands = (conv.operands[0], Ref("value", new_weight.output), Ref("value", new_bias.output))
    shapes = (*conv.rule.shapes[:2], (norm.shape[1],))
    rule = replace(conv.rule, operands=operands, shapes=shapes)
    return [new_weight, new_bias, replace(norm, operands=operands, rule=rule, absorbed=(conv.call,))]


def _affine(network: RegionNetwork, norm: RegionNode, frozen: Frozen) -> list[RegionNode]:
    statistics = norm.operands[1:]
    channels = (norm.shape[1],)
    scale = _global(network, norm, "scale", statistics, lambda *t: frozen.scale_and_shift(*t)[0], channels)
    shift = _global(network, norm, "shift", statistics, lambda *t: frozen.scale_and_shift(*t)[1], channels)
    operands = (norm.operands[0], Ref("value", scale.output), Ref("value", shift.output))
    rule = Affine(operands, (norm.shape, channels, channels))
    return [scale, shift, replace(norm, operands=operands, rule=rule)]


def _global(
    network: RegionNetwork,
    norm: RegionNode,
    what: str,
    operands: tuple[Ref, ...],
    function: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
) -> RegionNode:
    name = f"{norm.call}:{what}"
    network.shapes[name], network.axes[name] = shape, (None,) * len(shape)
    network.dtypes[name] = norm.dtype
    return RegionNode(name, norm.call, "global", operands, shape, norm.dtype, function=function)
