"""Whether a recording may be replayed with values that lie elsewhere in memory.

A model may write into a tensor and read the change through another that shares its memory. Stacked values are sometimes
copies where the original was a view, so such a program would read the old values. This finds the writes for which that
can happen; a model that has one runs member by member.
"""

from __future__ import annotations

from outcore.graph import Call, Graph
from outcore.graph.naming import function_name
from outcore.graph.queries import values_by_base
from outcore.graph.record.recording import Recording, Ref
from outcore.graph.structure import leaves
from outcore.ops.traits import SHARING


def unsafe_write(graph: Graph, recording: Recording) -> str | None:
    """The first call that writes memory which another name reads, or had; None if all are private."""
    order = {name: i for i, name in enumerate(graph.calls)}
    groups = values_by_base(graph)
    itself = state_in_place(recording)
    from_state = _views_of_state(recording)
    for call in graph.calls.values():
        for name in call.mutates:
            if name in itself:
                continue
            root = graph.values[name].base
            if root in graph.inputs or from_state & set(groups[root]):
                return call.name
            line = {name, *call.outputs}
            for other in groups[root]:
                later = any(order[c] > order[call.name] for c in graph.values[other].consumers)
                if (
                    other not in line
                    and (later or other in graph.outputs)
                    and not _made_after(graph, other, call, order)
                ):
                    return call.name
            if any(order[c] > order[call.name] for c in graph.values[name].consumers):
                return call.name
    return None


def written_values(graph: Graph) -> frozenset[str]:
    """Values that some call writes in place."""
    return frozenset(name for call in graph.calls.values() for name in call.mutates)


def _made_after(graph: Graph, value: str, call: Call, order: dict[str, int]) -> bool:
    """Whether a value that shares the memory was made from the written one afterwards, so it sees the change anyway."""
    producer = graph.values[value].producer
    return producer is not None and order[producer] > order[call.name]


def state_in_place(recording: Recording) -> frozenset[str]:
    """Values that are a parameter or buffer itself: the result of an in-place function on it."""
    found: set[str] = set()
    for step in recording.steps:
        refs = [ref for _, ref in leaves(step.args[:1], Ref)]
        if step.kind == "function" and refs and function_name(step.target).endswith("_"):
            if refs[0].kind == "state" or refs[0].name in found:
                found |= {*step.outputs[:1], *(new for new, _ in step.rebinds)}
    return frozenset(found)


def _views_of_state(recording: Recording) -> set[str]:
    """Values that may be views of a parameter or buffer."""
    found: set[str] = set()
    for step in recording.steps:
        refs = [ref for _, ref in leaves((step.args, step.kwargs), Ref)]
        viewed = step.kind == "function" and function_name(step.target) in SHARING
        if viewed and refs and (refs[0].kind == "state" or refs[0].name in found):
            found |= set(step.outputs[:1])
    return found
