"""What a call saves for backward by the table, whether or not the device is present."""

from __future__ import annotations

import math
from dataclasses import replace

from outcore.cost.costs import CallCost
from outcore.cost.saved import DerivedTensor, Saved
from outcore.graph import Graph
from outcore.ops import CallFacts
from outcore.ops.saved import SAVED


def facts_of(graph: Graph, name: str) -> CallFacts:
    """One call as the table's rules see it."""
    call = graph.calls[name]
    block = graph.blocks[call.block]
    is_module = block.kind == "module"
    return CallFacts(
        is_module=is_module,
        settings=block.detail if is_module else call.detail,
        inputs=tuple(graph.values[v] for v in call.inputs),
        outputs=tuple(graph.values[v] for v in call.outputs),
        parameters=call.parameters,
        training=graph.training,
        in_place=bool(call.mutates),
    )


def kept(graph: Graph, call: str, device_kind: str) -> tuple[Saved, ...] | None:
    """What backward of a call saves, without weights and buffers; None if the table does not know the operation."""
    facts, rule = facts_of(graph, call), SAVED.find(graph.blocks[graph.calls[call].block].type)
    if rule is None or not facts.inputs:
        return None
    found: dict[str, Saved] = {}
    for keep in rule.kept(device_kind):
        if not keep.applies(facts):
            continue
        if keep.what == "derived":
            size = keep.bytes(facts) if keep.bytes else 0
            saved = Saved(f"{call}~{keep.name}", "derived", size, DerivedTensor(keep.name))
            found[saved.of] = saved
        elif keep.what != "parameter":
            names = graph.calls[call].outputs[:1] if keep.what == "output" else graph.calls[call].inputs
            for name in names if keep.index is None else names[keep.index : keep.index + 1]:
                first = graph.values[graph.values[name].base]
                if _is_cast(graph.values[name].dtype, facts.outputs[0].dtype):
                    # Autocast computes it in float32, and backward keeps the copy and not the value.
                    size = 4 * math.prod(graph.values[name].shape)
                    found[f"{call}~cast"] = Saved(f"{call}~cast", "derived", size, DerivedTensor("cast"))
                else:
                    found[first.name] = Saved(first.name, "value", first.bytes)
    return tuple(found.values())


def _is_cast(given: str, returned: str) -> bool:
    return given in ("float16", "bfloat16") and returned == "float32"


def keep_on(graph: Graph, cost: CallCost, device_kind: str) -> CallCost:
    """The cost of a call as tried on a CPU, corrected for a device that saves something else."""
    rule = SAVED.find(cost.type)
    if rule is None or device_kind not in rule.keeps_on or not cost.has_backward:
        return cost
    entries = kept(graph, cost.call, device_kind) or ()
    weights = tuple(s for s in cost.saved if s.kind in ("parameter", "buffer"))
    # The workspace of the CPU's implementation says nothing about another device's.
    return replace(
        cost,
        saved=(*weights, *entries),
        saved_source="analytic",
        workspace_source="unknown",
        workspace_forward_bytes=0,
        workspace_backward_bytes=0,
    )
