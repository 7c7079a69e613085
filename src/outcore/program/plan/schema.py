"""What a plan may say: the schema of its document, and the checks that need the graph it is for.

A plan is written by the planner or by hand, and everything in it is a decision that something later acts on. What
nobody would act on (a name that is not known, a figure that cannot be) is a mistake of its writer, and is refused
before anything runs, by the name of the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from outcore.documents.schema import (
    Anything,
    Either,
    Flag,
    ListOf,
    MapOf,
    Maybe,
    Number,
    OneOf,
    Record,
    Text,
    Whole,
    check,
)
from outcore.errors import PlanError, suggest
from outcore.graph import Graph
from outcore.ops.recompute_encode import CODECS
from outcore.program.policies import parse_policy

if TYPE_CHECKING:
    from outcore.program.plan.document import Plan

MOST = 65_536
"""Micro-batches, batches, replicas, ranks or stages: more is a slip of the finger."""
_BYTES = Whole(least=0, most=2**60)
_STATE = Record(
    may={
        "parameters": OneOf(("keep", "offload")),
        "gradients": OneOf(("keep", "offload")),
        "optimizer": OneOf(("keep", "offload")),
        "update": OneOf(("step", "backward")),
        "stage_bytes": Maybe(Whole(least=1, most=2**60)),
        "flat_buffer_bytes": Whole(least=1, most=2**60),
    }
)
_SIDE = Whole(least=1, most=2**31)
_STREAM = Record(
    {"tile": Either((_SIDE, ListOf(_SIDE, 1, 3)))},
    {
        "boundary": Maybe(Either((Text(), ListOf(Text(), 1)))),
        "statistics": Flag(),
        "keep": ListOf(Text()),
        "on_host": Flag(),
        "rest": Maybe(MapOf(Text())),
    },
)
_SPATIAL = Record(
    {"grid": ListOf(Whole(least=1, most=4096), 1, 3)},
    {
        "cuts": ListOf(ListOf(Number(least=0, most=1)), 0, 3),
        "twice": ListOf(Text()),
        "early": ListOf(Text()),
        "loss": OneOf(("whole", "parts")),
        "tile": Either((_SIDE, ListOf(_SIDE, 1, 3))),
    },
)
_PREDICTED = Record(
    {"time_s": Number(least=0), "peak_bytes": ListOf(_BYTES, 1), "bubble": Number(least=0, most=1)},
    {"judge": Text(), "samples": Maybe(Whole(least=1, most=2**40))},
)


def schema(choices: Mapping[str, Any]) -> Record:
    """The schema of a plan; `choices` are the literal types of its fields that have one."""
    count = Whole(least=1, most=MOST)
    return Record(
        {"graph": Text(), "stages": ListOf(Either((Text(), ListOf(Text(), 1))), 1, MOST)},
        {
            "format": Anything(),
            **{name: OneOf(get_args(kind)) for name, kind in choices.items()},
            "micro_batches": count,
            "batches": count,
            "replicas": count,
            "placement": Maybe(ListOf(Whole(least=0, most=MOST), 1)),
            "order": ListOf(Text(), 0, MOST),
            "policy": MapOf(Text()),
            "state": _STATE,
            "tied": MapOf(ListOf(Whole(least=0, most=MOST), 1)),
            "stream": Maybe(_STREAM),
            "spatial": Maybe(_SPATIAL),
            "memory_order": Maybe(OneOf(("channels_last",))),
            "machine": Maybe(Text()),
            "memory_bytes": Maybe(Whole(least=1, most=2**60)),
            "predicted": Maybe(_PREDICTED),
            "why": ListOf(Text()),
        },
    )


def check_spatial(plan: Plan) -> None:
    """Refuse what cannot be done together with a grid of ranks."""
    check(plan.spatial, _SPATIAL, "spatial", PlanError)
    others = {
        "the gems schedule": plan.schedule == "gems",
        "an order of its own": bool(plan.order),
        "policies for values": bool(plan.policy),
        "batch_norm synchronised over replicas": plan.batch_norm == "synchronised" and plan.replicas > 1,
        "batch_norm deferred": plan.batch_norm == "deferred",
    }
    if given := [name for name, there in others.items() if there]:
        raise PlanError(f"a plan with a grid cannot have {given[0]}; leave one of them out")
    if plan.placement is not None and plan.placement[0] != 0:
        raise PlanError("the first stage of a plan with a grid is on rank 0 and the next ones; begin placement with 0")


def check_policy(value: str, policy: object) -> None:
    """Refuse a policy that is not known."""
    if not isinstance(policy, str):
        raise PlanError(f"policy {policy!r} of {value} is not a string")
    try:
        parse_policy(policy)
    except PlanError as error:
        raise PlanError(str(error).replace("is not known", f"of {value} is not known")) from None


def check_against(plan: Plan, graph: Graph, stage_of: Mapping[str, int]) -> None:
    """Refuse what a plan says of blocks, values and parameters that the graph does not have, or has elsewhere."""
    for value, policy in plan.policy.items():
        call, derived, _ = value.partition("~")
        if value not in graph.values and not (derived and call in graph.calls):
            raise PlanError(f"policy names {value}, which is no value of {graph.root.type}")
        if (codec := parse_policy(policy).codec) and codec not in CODECS:
            raise PlanError(f"policy {policy!r} of {value}: no encoding {codec!r}; {suggest(codec, CODECS)}")
    for parameter, stages in plan.tied.items():
        users = {stage_of[name] for name, call in graph.calls.items() if parameter in call.parameters}
        if any(not 0 <= k < len(plan.stages) for k in stages):
            raise PlanError(f"tied parameter {parameter} names stage {max(stages)} of {len(plan.stages)}")
        if len(set(stages)) != len(stages):
            raise PlanError(f"tied parameter {parameter} names a stage twice: {list(stages)}")
        if not users:
            raise PlanError(f"tied names {parameter}, which is no parameter of {graph.root.type}")
        if set(stages) != users:
            raise PlanError(f"tied parameter {parameter} names stages {sorted(stages)}; {sorted(users)} read it")
    if plan.predicted is not None and len(plan.predicted.peak_bytes) != plan.ranks_per_replica:
        raise PlanError(
            f"predicted.peak_bytes has {len(plan.predicted.peak_bytes)} figures for {plan.ranks_per_replica} ranks"
        )
    if plan.stream is not None:
        _check_stream(plan.stream, graph, len(plan.stages))


def _check_stream(stream: Mapping[str, Any], graph: Graph, stages: int) -> None:
    if stages != 1:
        raise PlanError(f"stream is for one stage, and the plan has {stages}; leave it out, or name one stage")
    boundary = stream.get("boundary") or ()
    known = (*graph.blocks, *graph.calls, *graph.values)
    for field, names in (("boundary", [boundary] if isinstance(boundary, str) else boundary), ("keep", _keep(stream))):
        for name in names:
            if name not in known:
                raise PlanError(f"stream.{field} names {name!r}, which is not in {graph.root.type}")
    for value, policy in (stream.get("rest") or {}).items():
        check_policy(value, policy)


def _keep(stream: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in stream.get("keep", ())]
