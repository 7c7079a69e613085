"""The plan: every decision about how a network is trained, as a document one can read, write, compare and keep.

    {
     "format": 1,
     "graph": "64193fdf436ded2f",
     "stages": [["stem", "layer1"], ["layer2", "head"]],
     "schedule": "gpipe",
     "micro_batches": 4
    }

is a complete plan: what is left out has a default. Stages name blocks (all that is inside comes along) or single calls
(``conv1#0``); functions that a model calls between its modules need not be named, they go where their inputs are.
`Plan.validate` checks a plan against a graph and names the block that is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from outcore.documents.reading import read_json, write_text
from outcore.documents.schema import MapOf, check
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.machine.units import counted, format_bytes, format_time
from outcore.notebook import html_of
from outcore.program.plan.order import check_order
from outcore.program.plan.schema import MOST, check_against, check_policy, check_spatial, schema
from outcore.program.plan.stage_names import place_calls

FORMAT = 1

Schedule = Literal["model_parallel", "gpipe", "1f1b", "gems"]
Exactness = Literal["bitwise", "reassociated", "lossy"]
BatchNorm = Literal["micro_batch", "deferred", "synchronised"]
"""Statistics of each micro-batch, updated every time; of each, but updated once per step; or of the whole batch."""

_SCHEMA = schema({"schedule": Schedule, "exactness": Exactness, "batch_norm": BatchNorm})


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """What a step is expected to take."""

    time_s: float
    peak_bytes: tuple[int, ...]
    """Of every rank of a replica."""
    bubble: float
    """Share of the ranks' time in which they wait."""
    judge: str = "closed form"
    """What predicted it."""
    samples: int | None = None
    """Of a step, where that is not the job's own batch."""


@dataclass(frozen=True)
class Plan:
    """How a network is trained.

    >>> plan = Plan("64193fdf436ded2f", (("stem", "layer1"), ("layer2", "head")), micro_batches=4)
    >>> Plan.from_json(plan.to_json()) == plan, plan.ranks
    (True, 2)
    """

    graph: str
    """Fingerprint of the graph."""
    stages: tuple[tuple[str, ...], ...]
    """Names of blocks or calls, per stage."""
    schedule: Schedule = "gpipe"
    micro_batches: int = 1
    batches: int = 1
    """Passes before the optimizer's step; under GEMS they alternate between the two replicas (eta)."""
    replicas: int = 1
    """Data-parallel copies of the whole pipeline."""
    placement: tuple[int, ...] | None = None
    """Rank of every stage inside a replica; None puts stage k on rank k."""
    order: tuple[str, ...] = ()
    """What every rank of a pipeline computes, in order (``F0 F1 B0 B1``), where that is not the order of the schedule,
    which then says where the stages are: under GEMS on two inverted replicas, which take the micro-batches in turn."""
    exactness: Exactness = "bitwise"
    batch_norm: BatchNorm = "micro_batch"
    policy: Mapping[str, str] = field(default_factory=dict)
    """Value -> keep, offload (or offload:early), recompute or encode:<how>; values that are not listed are kept."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Where parameters, gradients and optimizer state live, if not on the device."""
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter -> stages that hold a copy of it, whose gradients are added up."""
    stream: Mapping[str, Any] | None = None
    spatial: Mapping[str, Any] | None = None
    """The first stage on a grid of ranks, each with a part of the image: {"grid": [2, 2]}, with "cuts" where parts are
    not equal, "twice", values whose halo is computed on both sides of a cut and not sent, "early", values whose borders
    are computed ahead of the rest, and are on their way while that is computed, and "tile", pixels per tile where each
    rank streams its part."""
    memory_order: str | None = None
    """Of images in the network: "channels_last", or as they come; the graph is that of the network in this order."""
    machine: str | None = None
    """Fingerprint of the machine it was made for."""
    memory_bytes: int | None = None
    """The budget of a rank it was made for."""
    predicted: PredictedStep | None = None
    why: tuple[str, ...] = ()
    """Why this plan and not another: the runners-up with their figures."""

    def __post_init__(self) -> None:
        for name, choices in (("schedule", Schedule), ("exactness", Exactness), ("batch_norm", BatchNorm)):
            if (given := getattr(self, name)) not in get_args(choices):
                raise PlanError(f"{name} {given!r} is not known; choose one of {', '.join(get_args(choices))}")
        for name in ("micro_batches", "batches", "replicas"):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise PlanError(f"{name} must be a whole number of at least 1, not {given!r}")
            if given > MOST:
                raise PlanError(f"{name} is {given:,}; at most {MOST:,} make sense")
        if not self.stages or not all(self.stages):
            raise PlanError("every stage needs at least one block; give a list of names per stage")
        if self.placement is not None:
            if len(self.placement) != len(self.stages):
                raise PlanError(f"placement names {len(self.placement)} ranks for {len(self.stages)} stages")
            if min(self.placement) < 0:
                raise PlanError(
                    f"placement {list(self.placement)} names rank {min(self.placement)}; ranks begin with 0"
                )
            if set(self.placement) != set(range(max(self.placement) + 1)):
                raise PlanError(f"placement {list(self.placement)} leaves a rank without a stage")
        if self.order:
            if self.placement is not None or (self.schedule == "gems" and self.micro_batches > 1):
                raise PlanError(
                    "an order is for one stage to a rank, and under gems for 1 micro-batch in each of the batches; "
                    "leave out the placement, or the order"
                )
            pieces = self.micro_batches * self.batches
            check_order(self.order, len(self.stages), pieces, inverted=self.schedule == "gems")
        for value, policy in self.policy.items():
            check_policy(value, policy)
        if self.spatial is not None:
            check_spatial(self)

    @property
    def grid(self) -> tuple[int, ...]:
        """Ranks of the first stage along each pixel axis; empty where it runs on one rank."""
        return tuple(self.spatial["grid"]) if self.spatial is not None else ()

    @property
    def parts(self) -> int:
        """Ranks that share the image in the first stage."""
        return math.prod(self.grid)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one copy of the pipeline."""
        return self.parts - 1 + (len(self.stages) if self.placement is None else max(self.placement) + 1)

    @property
    def ranks(self) -> int:
        """Ranks of the whole plan."""
        return self.replicas * self.ranks_per_replica

    def rank_of(self, stage: int) -> int:
        """Rank of a stage inside a replica; of the first stage on a grid, the first of its ranks."""
        found = stage if self.placement is None else self.placement[stage]
        return found + self.parts - 1 if found else 0

    def calls(self, graph: Graph) -> tuple[tuple[str, ...], ...]:
        """The calls of every stage, in order; raises as `validate` does."""
        stage_of = place_calls(graph, self.stages)
        return tuple(tuple(c for c in graph.calls if stage_of[c] == k) for k in range(len(self.stages)))

    def validate(self, graph: Graph, *, ranks: int | None = None) -> None:
        """Check that the plan fits a graph (and a number of ranks); raises `PlanError` naming what is wrong."""
        if self.graph != graph.fingerprint:
            raise PlanError(
                f"the plan was made for graph {self.graph}, but this is {graph.root.type} with fingerprint "
                f"{graph.fingerprint}; plan this one"
            )
        check_against(self, graph, place_calls(graph, self.stages))
        if ranks is not None and ranks != self.ranks:
            raise PlanError(
                f"the plan needs {counted(self.ranks, 'rank')} ({counted(self.replicas, 'replica')} of "
                f"{self.ranks_per_replica}), but there {'is' if ranks == 1 else 'are'} {ranks}; start {self.ranks} "
                f"(outcore train --ranks {self.ranks}), or plan for {ranks}"
            )

    def diff(self, other: Plan) -> list[str]:
        """What is different in another plan, one line each."""
        lines = []
        here = {name: k for k, stage in enumerate(self.stages) for name in stage}
        there = {name: k for k, stage in enumerate(other.stages) for name in stage}
        if len(self.stages) != len(other.stages):
            lines.append(f"stages: {len(self.stages)} -> {len(other.stages)}")
        for name in dict.fromkeys((*here, *there)):
            a, b = here.get(name), there.get(name)
            if a != b:
                lines.append(f"{name}: {_stage(a)} -> {_stage(b)}")
        for f in fields(self):
            if f.name not in ("stages", "predicted", "policy", "why"):
                a, b = getattr(self, f.name), getattr(other, f.name)
                if a != b:
                    lines.append(f"{f.name}: {_plain(a)} -> {_plain(b)}")
        for value in dict.fromkeys((*self.policy, *other.policy)):
            was, is_now = self.policy.get(value, "keep"), other.policy.get(value, "keep")
            if was != is_now:
                lines.append(f"policy of {value}: {was} -> {is_now}")
        if self.predicted and other.predicted and self.predicted != other.predicted:
            p, q = self.predicted, other.predicted
            lines.append(f"predicted time: {p.time_s:.6g} s -> {q.time_s:.6g} s")
            lines.append(f"predicted peak: {max(p.peak_bytes):,} bytes -> {max(q.peak_bytes):,} bytes")
        return lines

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_of(self)

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads back; what has its default is left out."""
        document: dict[str, Any] = {"format": FORMAT, "graph": self.graph, "stages": [list(s) for s in self.stages]}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in document or value is None or value in ((), {}):
                continue
            document[f.name] = value if not isinstance(value, PredictedStep) else _without_none(asdict(value))
        plain: dict[str, Any] = json.loads(json.dumps(document))
        return plain

    @classmethod
    def from_json(cls, document: Any, source: str | Path = "the plan") -> Plan:
        """The plan in a document, also a hand-written one; `source` is what a refusal calls it."""
        check(document, MapOf(), source, PlanError)
        if document.get("format") != FORMAT:
            raise PlanError(f'this plan has "format": {document.get("format")!r}; this outcore reads format {FORMAT}')
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(document) - known - {"format"}):
            raise PlanError(f"a plan has no field {unknown[0]!r}; it has {', '.join(sorted(known))}")
        if missing := [name for name in ("graph", "stages") if name not in document]:
            raise PlanError(f"the plan has no field {missing[0]!r}")
        check(document, _SCHEMA, source, PlanError)
        given: dict[str, Any] = {k: v for k, v in document.items() if k != "format"}
        given["stages"] = tuple(tuple([s] if isinstance(s, str) else s) for s in given["stages"])
        for name in ("placement", "order", "why"):
            if given.get(name) is not None:
                given[name] = tuple(given[name])
        if "tied" in given:
            given["tied"] = {name: tuple(stages) for name, stages in given["tied"].items()}
        if given.get("predicted") is not None:
            row = dict(given["predicted"])
            given["predicted"] = PredictedStep(**(row | {"peak_bytes": tuple(row["peak_bytes"])}))
        return cls(**given)

    def for_batch(self, samples: int | None) -> Plan:
        """The plan with the batch that its figures are for; None for the job's own."""
        if self.predicted is None:
            return self
        return replace(self, predicted=replace(self.predicted, samples=samples))

    @property
    def samples(self) -> int | None:
        """Of a step, where its figures are for another batch than the job's own."""
        return None if self.predicted is None else self.predicted.samples

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, a stage per line."""
        document = self.to_json()
        marks = {}
        for name in ("stages", "placement", "order"):
            if name in document:
                marks[f'"@{name}"'] = _rows(document[name])
                document[name] = f"@{name}"
        text = json.dumps(document, indent=1, ensure_ascii=False)
        for mark, rows in marks.items():
            text = text.replace(mark, rows)
        write_text(path, text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file."""
        return cls.from_json(read_json(path, MapOf(), PlanError), path)

    @property
    def arrangement(self) -> str:
        """How the ranks are used, in a few words: ``2 stages x 2 replicas, gems``."""
        if self.spatial is not None:
            rest = f", then {counted(len(self.stages) - 1, 'more stage')}" if len(self.stages) > 1 else ""
            copies = f" x {self.replicas} replicas" if self.replicas > 1 else ""
            shared = (
                f"image over {' x '.join(str(n) for n in self.grid)} ranks" if self.parts > 1 else "image on one rank"
            )
            return f"{shared}{_in_tiles(self.spatial.get('tile'))}{rest}{copies}"
        if len(self.stages) == 1:
            return f"data parallel, {self.replicas} replicas" if self.replicas > 1 else "one stage"
        copies = f" x {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{len(self.stages)} stages{copies}, {self.schedule}{' in an order of its own' if self.order else ''}"

    def __str__(self) -> str:
        lines = [self.arrangement]
        for count, noun in ((self.micro_batches, "micro-batches"), (self.batches, "batches in turn")):
            lines[0] += f", {count} {noun}" if count > 1 else ""
        for k, names in enumerate(self.stages):
            shown = f"{names[0]} … {names[-1]} ({len(names)} blocks)" if len(names) > 4 else ", ".join(names)
            shown = shown or "the whole network"
            peak = ""
            if self.predicted:
                peak = f", rank peak {format_bytes(self.predicted.peak_bytes[self.rank_of(k)])}"
            last = f" to {self.parts - 1}" if k == 0 and self.parts > 1 else ""
            lines.append(f"  stage {k} on rank {self.rank_of(k)}{last}{peak}: {shown}")
        if self.predicted:
            lines.append(f"  step {format_time(self.predicted.time_s)}, bubble {self.predicted.bubble:.0%} (predicted)")
        return "\n".join([*lines, *(f"  {line}" for line in self.why)])


def _in_tiles(tile: int | Sequence[int] | None) -> str:
    if tile is None:
        return ""
    sides = [tile] if isinstance(tile, int) else tile
    return f" in tiles of {' x '.join(map(str, sides))} px"


def _stage(k: int | None) -> str:
    return "not named" if k is None else f"stage {k}"


def _plain(value: Any) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _rows(value: list[Any]) -> str:
    if value and isinstance(value[0], list):
        return "[\n  " + ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value) + "\n ]"
    return json.dumps(value)


def _without_none(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}
