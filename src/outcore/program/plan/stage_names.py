"""The calls that the names of a plan's stages mean, and the names for stages of calls.

A stage names blocks or single calls. What is inside a block comes along; a function that the model calls between its
modules goes where its latest input is, or to its first reader if nothing before it is named. Every call then has one
stage, data flows forward only, and memory that is written in place is never shared across a cut: whatever breaks that
is refused, by the name of the block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outcore.errors import PlanError, suggest
from outcore.graph import Graph
from outcore.graph.parts import ancestors
from outcore.graph.queries import reads_after_writes


def place_calls(graph: Graph, stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """The stage of every call, given names per stage; raises `PlanError` naming the block that is wrong."""
    stage_of = _named(graph, stages)
    _place_functions(graph, stage_of)
    if missing := [c.block for name, c in graph.calls.items() if name not in stage_of]:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise PlanError(f"{missing[0]}{more} is in no stage; add it, or a block around it, to one")
    _refuse_backward_flow(graph, stage_of)
    _refuse_torn_memory(graph, stage_of)
    if empty := set(range(len(stages))) - set(stage_of.values()):
        raise PlanError(f"stage {min(empty)} runs nothing: its blocks are never called")
    return stage_of


def name_stages(graph: Graph, calls: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Names for stages: the largest blocks that lie entirely in one, calls where a block is shared."""
    stage_of = {call: k for k, names in enumerate(calls) for call in names}
    stages_in: dict[str, set[int]] = {}
    for name, call in graph.calls.items():
        for path in (*ancestors(call.block), call.block):
            stages_in.setdefault(path, set()).add(stage_of[name])
    named: list[dict[str, None]] = [{} for _ in calls]
    for name, call in graph.calls.items():
        path = next((p for p in (*ancestors(call.block), call.block) if len(stages_in[p]) == 1), name)
        named[stage_of[name]][path] = None
    return tuple(tuple(names) for names in named)


def _named(graph: Graph, stages: Sequence[Sequence[str]]) -> dict[str, int]:
    stage_of: dict[str, int] = {}
    named: dict[str, str] = {}
    for k, names in enumerate(stages):
        for name in names:
            for inside in _calls_of(graph, name):
                if inside in stage_of:
                    where = f"stage {k} twice" if stage_of[inside] == k else f"stages {stage_of[inside]} and {k}"
                    also = "" if named[inside] == name else f" (as {named[inside]} and as {name})"
                    raise PlanError(f"{graph.calls[inside].block} is in {where}{also}; name it once")
                stage_of[inside], named[inside] = k, name
    return stage_of


def _calls_of(graph: Graph, name: str) -> list[str]:
    if name in graph.calls:
        return [name]
    if name in graph.blocks:
        return [call.name for call in graph.leaves(name)]
    raise PlanError(f"no block {name!r} in {graph.root.type}; {suggest(name, [*graph.blocks, *graph.calls])}")


def _place_functions(graph: Graph, stage_of: dict[str, int]) -> None:
    for name, call in graph.calls.items():
        if name not in stage_of and graph.blocks[call.block].kind == "function":
            before = [stage_of[p] for v in call.inputs if (p := graph.values[v].producer) in stage_of]
            if before:
                stage_of[name] = max(before)
    for name, call in reversed(list(graph.calls.items())):
        if name not in stage_of and graph.blocks[call.block].kind == "function":
            after = [stage_of[c] for v in call.outputs for c in graph.values[v].consumers if c in stage_of]
            stage_of[name] = min(after, default=0)


def _refuse_backward_flow(graph: Graph, stage_of: Mapping[str, int]) -> None:
    for name, call in graph.calls.items():
        for value in call.inputs:
            source = graph.values[value].producer
            if source is not None and stage_of[source] > stage_of[name]:
                raise PlanError(
                    f"{call.block} is in stage {stage_of[name]} but reads {value} from stage {stage_of[source]}: data "
                    "would flow backwards; move one of them"
                )
        for earlier in call.after:
            if stage_of.get(earlier, -1) > stage_of[name]:
                raise PlanError(
                    f"{call.block} is in stage {stage_of[name]} but must run after {earlier}, which is later"
                )


def _refuse_torn_memory(graph: Graph, stage_of: Mapping[str, int]) -> None:
    for writer, value, reader in reads_after_writes(graph):
        if stage_of[reader] != stage_of[writer]:
            raise PlanError(
                f"{graph.calls[writer].block} writes into the memory of {value}, which {graph.calls[reader].block} "
                f"reads afterwards in another stage; put both in stage {stage_of[writer]}"
            )
