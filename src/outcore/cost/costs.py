"""What every call of a network takes: time, FLOPs and bytes, and where each number came from.

A `Costs` belongs to one graph on one device. It holds facts per call and answers questions about blocks at any
depth; it holds no tensors, so it is saved as JSON and read on another machine.

Bytes that autograd keeps between forward and backward are listed as entries, each naming the memory it is in: a
value of the graph, a parameter or buffer, or a tensor that only backward knows (a cast, indices, a mask,
statistics). The same memory kept by two calls (a ReLU's result and the next convolution's input) is named twice
and counted once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from outcore.cost.saved import Saved
from outcore.documents.reading import read_json, write_text
from outcore.documents.schema import Anything, ListOf, MapOf, Record, Text, check
from outcore.documents.typed_schema import record_of, schema_of
from outcore.errors import OutcoreError
from outcore.graph.parts import ROOT, ancestors
from outcore.machine.clock import TimedRuns
from outcore.notebook import html_of

if TYPE_CHECKING:
    from outcore.graph import Graph

FORMAT = 2

Source = Literal["measured", "analytic", "scaled", "unknown"]
"""Where a number came from: "measured" on the device; "analytic", from shapes and rules only; "scaled" from a smaller
version; or "unknown"."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient that a call's backward makes."""

    of: str
    """Name of the input value or parameter."""
    bytes: int
    """Memory it takes; 0 if it is the gradient of an output, passed on."""
    passes: str | None = None
    """The output whose gradient it is, in the same memory."""
    stride: tuple[int, ...] | None = None
    """Its strides, where they are not those of what it belongs to."""


@dataclass(frozen=True, slots=True)
class CallCost:
    """What one call takes."""

    call: str
    block: str
    type: str
    """Class of the layer or name of the function."""
    forward: TimedRuns | None = None
    backward: TimedRuns | None = None
    """None where it was not measured, or where there is nothing to do."""
    time_source: Source = "unknown"
    reason: str = ""
    """Why there is no time."""
    flops_forward: int = 0
    flops_backward: int = 0
    issue_forward: float = 0.0
    issue_backward: float = 0.0
    """Work of the host to launch its operations, in simple operations (`outcore.cost.measured.launch_count`)."""
    parameter_bytes: int = 0
    output_bytes: int = 0
    """Memory of the outputs that is not shared with inputs or weights."""
    outputs: Mapping[str, int] = field(default_factory=dict)
    """That memory, by the first value in it."""
    saved: tuple[Saved, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    """In the order of the inputs, then the parameters."""
    arriving: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Strides of gradients of outputs that have another layout than the outputs."""
    saved_source: Source = "unknown"
    workspace_forward_bytes: int = 0
    workspace_backward_bytes: int = 0
    """Peak above what is there before and after."""
    workspace_source: Source = "unknown"
    fixed_forward_s: float = 0.0
    fixed_backward_s: float = 0.0
    """Of the seconds, those that a part of the batch takes too (`outcore.cost.fixed_times`); 0 where it is not
    known."""
    repeats: bool = True
    """Whether it gives the same bits when backward runs it again."""

    @property
    def time_s(self) -> float:
        """Median of forward and backward together; 0 where unknown."""
        return sum(t.median_s for t in (self.forward, self.backward) if t is not None)

    @property
    def dispatch_s(self) -> float:
        """Host time to launch forward and backward; 0 where unknown."""
        return sum(t.dispatch_s for t in (self.forward, self.backward) if t is not None)

    def at_depth(self, depth: int) -> str:
        """The block at a depth that the call is in, or its own if that lies above."""
        line = [*ancestors(self.block), self.block]
        return line[min(depth, len(line)) - 1]

    @property
    def has_backward(self) -> bool:
        """Whether any gradient flows through it."""
        return bool(self.gradients)


@dataclass(frozen=True, slots=True)
class Totals:
    """The sum over some calls."""

    calls: int
    forward_s: float
    backward_s: float
    flops_forward: int
    flops_backward: int
    parameter_bytes: int
    output_bytes: int
    saved_bytes: int
    """Feature maps and derived tensors saved for backward, each memory once; without weights."""
    workspace_bytes: int
    """The largest of a single call."""
    unmeasured: tuple[str, ...]
    """Calls without a time."""

    @property
    def time_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Costs:
    """The costs of a graph on a device: what `outcore.measure` returns."""

    model: str
    fingerprint: str
    """Of the graph; using costs with another graph raises."""
    device: str
    """Name of the device, e.g. "NVIDIA H200" or "cpu (2 threads)"."""
    device_kind: str
    calls: Mapping[str, CallCost]
    """By name, in the order of execution."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every parameter of the model that is trained, by name; shared ones once."""
    fixed_bytes: int = 0
    """Bytes of frozen parameters and of buffers."""
    library_bytes: int = 0
    """Bytes that the device's libraries allocated during the measurement and keep (matrix product workspaces)."""
    between_s: float = 0.0
    """Host time per call and direction beyond what an isolated call takes."""
    start_s: float = 0.0
    """Host time of starting backward, once a step."""
    beat_s: float = 0.0
    """Seconds of the reference work at which launch times hold (`outcore.cost.measured.host_speed`); 0: does not
    matter."""
    sum_bytes_per_s: float = 0.0
    """Rate at which backward adds up gradients of one value, in bytes read and written; 0 where it is not known."""
    sum_dispatch_s: float = 0.0
    """Host time of launching one such sum."""
    notes: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """All parameters and buffers."""
        return sum(self.parameters.values()) + self.fixed_bytes

    @property
    def unmeasured(self) -> Mapping[str, str]:
        """The calls that have no time, each with the reason."""
        return {c.call: c.reason for c in self.calls.values() if c.time_source == "unknown"}

    def __getitem__(self, call: str) -> CallCost:
        """The cost of a call."""
        try:
            return self.calls[call]
        except KeyError:
            raise OutcoreError(f"no call {call!r} in the costs of {self.model}") from None

    def belong_to(self, graph: Graph) -> bool:
        """Whether they are those of a graph at its size (a fingerprint is the same at every size)."""
        made = {name: size for cost in self.calls.values() for name, size in cost.outputs.items()}
        return self.fingerprint == graph.fingerprint and all(
            graph.values[name].bytes == size for name, size in made.items() if name in graph.values
        )

    def inside(self, path: str = ROOT) -> list[CallCost]:
        """The costs of the calls in a block, at any depth."""
        found = [c for c in self.calls.values() if path in (ROOT, c.block, *ancestors(c.block))]
        if not found and path != ROOT:
            raise OutcoreError(f"nothing was called in a block {path!r} of {self.model}")
        return found

    def total(self, path: str = ROOT) -> Totals:
        """What a block takes, with all blocks inside it."""
        return total(self.inside(path))

    def by_depth(self, depth: int = 1) -> dict[str, Totals]:
        """The costs at one depth: each block there, and leaves above it, with its total."""
        groups: dict[str, list[CallCost]] = {}
        for cost in self.calls.values():
            groups.setdefault(cost.at_depth(depth), []).append(cost)
        return {path: total(group) for path, group in groups.items()}

    def by_kind(self) -> dict[str, Totals]:
        """Totals by kind of layer, the most time (or without times, the most saved bytes) first."""
        groups: dict[str, list[CallCost]] = {}
        for cost in self.calls.values():
            groups.setdefault(cost.type, []).append(cost)
        totals = {kind: total(group) for kind, group in groups.items()}
        return dict(sorted(totals.items(), key=lambda row: (-row[1].time_s, -row[1].saved_bytes, row[0])))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_of(self)

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads back; defaults are left out."""
        return {
            "format": FORMAT,
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("calls", "notes", "parameters")},
            "parameters": dict(self.parameters),
            "notes": list(self.notes),
            "calls": [_plain(c) for c in self.calls.values()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str | Path = "costs") -> Self:
        """The costs that `to_json` wrote.

        Raises:
            OutcoreError: it is something else; names the place in `source`.
        """
        if check(data, MapOf(), source, OutcoreError).get("format") != FORMAT:
            raise OutcoreError(f"{source}: format is {data.get('format')!r}; this outcore reads format {FORMAT}")
        check(data, _document(), source, OutcoreError)
        rest = {f.name: data[f.name] for f in fields(cls) if f.name not in ("calls", "notes") and f.name in data}
        calls = [_call(row) for row in data["calls"]]
        return cls(calls={c.call: c for c in calls}, notes=tuple(data["notes"]), **rest)

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        return cls.from_json(read_json(path, MapOf(), OutcoreError), path)

    def __str__(self) -> str:
        whole = self.total()
        lines = [f"{self.model.rpartition('.')[2]} on {self.device}: {len(self.calls)} calls, {_summary(whole)}"]
        width = max((len(kind) for kind in self.by_kind()), default=0)
        lines += [f"  {kind:{width}}  x {t.calls:<4} {_summary(t)}" for kind, t in self.by_kind().items()]
        if self.unmeasured:
            lines.append(f"  {len(self.unmeasured)} calls have no time, e.g. {next(iter(self.unmeasured.items()))}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def total(costs: Iterable[CallCost]) -> Totals:
    """The sum of some calls, memory that several of them keep counted once."""
    rows = list(costs)
    kept = {s.of: s.bytes for c in rows for s in c.saved if s.kind in ("value", "derived")}
    return Totals(
        calls=len(rows),
        forward_s=sum(c.forward.median_s for c in rows if c.forward),
        backward_s=sum(c.backward.median_s for c in rows if c.backward),
        flops_forward=sum(c.flops_forward for c in rows),
        flops_backward=sum(c.flops_backward for c in rows),
        parameter_bytes=sum(c.parameter_bytes for c in rows),
        output_bytes=sum(c.output_bytes for c in rows),
        saved_bytes=sum(kept.values()),
        workspace_bytes=max((max(c.workspace_forward_bytes, c.workspace_backward_bytes) for c in rows), default=0),
        unmeasured=tuple(c.call for c in rows if c.time_source == "unknown"),
    )


def _summary(t: Totals) -> str:
    time = f"forward {_ms(t.forward_s)}, backward {_ms(t.backward_s)}, " if t.time_s else ""
    return (
        f"{time}{(t.flops_forward + t.flops_backward) / 1e9:,.2f} GFLOP, {_mib(t.parameter_bytes)} parameters, "
        f"{_mib(t.saved_bytes)} kept for backward, {_mib(t.workspace_bytes)} workspace"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


@functools.cache
def _document() -> Record:
    """What saved costs hold: calls are a list, so that their order is kept."""
    rest = record_of(Costs, "calls", "notes")
    more = {"format": Anything(), "notes": ListOf(Text()), "calls": ListOf(schema_of(CallCost))}
    return Record({**rest.needed, **more}, rest.may)


def _plain(cost: CallCost) -> dict[str, Any]:
    default = CallCost("", "", "")
    row = {k: v for k, v in asdict(cost).items() if v != getattr(default, k)}
    return {"call": cost.call, "block": cost.block, "type": cost.type, **row}


def _call(row: Mapping[str, Any]) -> CallCost:
    known: dict[str, Any] = dict(row)
    for key in ("forward", "backward"):
        if known.get(key) is not None:
            known[key] = TimedRuns(**known[key])
    known["saved"] = tuple(Saved.from_json(s) for s in known.get("saved", ()))
    known["gradients"] = tuple(_gradient(g) for g in known.get("gradients", ()))
    known["arriving"] = {name: tuple(stride) for name, stride in known.get("arriving", {}).items()}
    return replace(CallCost("", "", ""), **known)


def _gradient(row: Mapping[str, Any]) -> Gradient:
    stride = row.get("stride")
    return Gradient(row["of"], row["bytes"], row.get("passes"), tuple(stride) if stride is not None else None)
