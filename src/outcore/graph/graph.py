"""The network as a value: blocks, calls, values; printable, comparable, saved as JSON.

The graph holds names and numbers only, no tensors and no modules, so it can be made on one machine and read on another.
What can be *run* (`graph.module`, `graph.subgraph(...)`) hangs on the recording the graph was made from; a graph read
from a file has none and says so.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outcore.documents.reading import read_json, write_text
from outcore.documents.schema import Anything, Flag, ListOf, MapOf, Record, Text, check
from outcore.documents.typed_schema import schema_of
from outcore.errors import OutcoreError, suggest
from outcore.graph.parts import ROOT, Block, Call, Value, ancestors
from outcore.graph.queries import Cut, Skip, cuts, skips
from outcore.graph.structure import device_of
from outcore.graph.subgraph import Subgraph
from outcore.graph.view import View, view
from outcore.notebook import html_of
from outcore.ops.traits import REARRANGING

if TYPE_CHECKING:
    import torch

    from outcore.graph.record.captured_module import CapturedModule
    from outcore.graph.record.recording import Recording

FORMAT = 1


@dataclass(frozen=True)
class Graph:
    """A recorded network: what `outcore.capture` returns."""

    model: str
    """``package.module.Class`` of the model."""
    training: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    blocks: Mapping[str, Block]
    """By path, the whole model first (path ``""``)."""
    calls: Mapping[str, Call]
    """By name, in the order of execution, which is a topological order."""
    values: Mapping[str, Value]
    notes: tuple[str, ...] = ()
    """What a reader should know, e.g. that the recording needed real data."""
    output_names: tuple[str, ...] = field(default=(), compare=False)
    """Where each output stands in what the model returns: a key of a dictionary, a number in a tuple, empty for one
    tensor alone; nothing at all where that is not known."""
    executable: tuple[CapturedModule, Recording] | None = field(default=None, compare=False, repr=False)
    """What runs it; None where the graph was read from a file, or shows a part of another."""

    @property
    def module(self) -> CapturedModule:
        """The captured graph as a module that calls the user's own modules."""
        return self._running()[0]

    @property
    def recording(self) -> Recording:
        """The run of the model that the graph was made from."""
        return self._running()[1]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return device_of(self.module.model)

    @property
    def fingerprint(self) -> str:
        """Hash of the structure: blocks, connections and parameter counts, not sizes of inputs or batch.

        Functions that only rearrange (views, transpositions) are left out, connections pass through them: torch's own
        modules write them differently from version to version.
        """
        blocks = [b for b in self.blocks.values() if not (b.kind == "function" and b.type in REARRANGING)]
        origins: dict[str, tuple[str, ...]] = {name: (name,) for name in self.inputs}
        calls = []
        for call in self.calls.values():
            read = tuple(dict.fromkeys(o for v in call.inputs for o in origins[v]))
            if (block := self.blocks[call.block]).kind == "function" and block.type in REARRANGING:
                origins.update(dict.fromkeys(call.outputs, read))
            else:
                origins.update((v, (v,)) for v in call.outputs)
                calls.append((call.name, read, call.outputs, call.parameters))
        facts = [[(b.path, b.type, b.calls, b.parameters) for b in blocks], calls]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def root(self) -> Block:
        """The block that is the whole model."""
        return self.blocks[ROOT]

    def __getitem__(self, path: str) -> Block:
        """The block of that path."""
        try:
            return self.blocks[path]
        except KeyError:
            raise self._unknown(path) from None

    def __contains__(self, path: object) -> bool:
        return path in self.blocks

    def leaves(self, path: str = ROOT) -> Iterator[Call]:
        """The calls inside a block, in order."""
        self[path]
        return (call for call in self.calls.values() if path == ROOT or path in (call.block, *ancestors(call.block)))

    def adjacency(
        self,
        depth: int | None = None,
        direction: Literal["outputs", "inputs"] = "outputs",
        *,
        expand: Iterable[str] = (),
        functions: bool = False,
    ) -> dict[str, list[str]]:
        """Map each block to the blocks it feeds (``"outputs"``) or is fed by (``"inputs"``).

        Args:
            depth: 1 shows the model's own children, 2 theirs, None the leaf modules.
            direction: which way the lists point.
            expand: blocks shown one level deeper than `depth` says.
            functions: also list functions; otherwise the connections pass through them.
        """
        if direction not in ("outputs", "inputs"):
            raise ValueError(f'direction must be "outputs" or "inputs", not {direction!r}')
        return self.view(depth, expand=expand, functions=functions, by_call=False).adjacency(direction)

    def view(
        self,
        depth: int | None = None,
        *,
        expand: Iterable[str] = (),
        functions: bool = True,
        by_call: bool = True,
    ) -> View:
        """The graph at one level of detail, as nodes and edges; what `adjacency` and the pictures are made from."""
        for path in (expanded := tuple(expand)):
            self[path]
        return view(self, depth, expanded, functions, by_call)

    def expand(self, path: str) -> Graph:
        """The inside of one block as a graph of its own, with the values that enter and leave it."""
        return self.restrict(list(self.leaves(path)), path)

    def restrict(self, calls: Sequence[Call], path: str = ROOT) -> Graph:
        """The graph of some of the calls, with the values that enter and leave them."""
        names = {call.name for call in calls}
        used = dict.fromkeys(v for call in calls for v in (*call.inputs, *call.outputs))
        kept_paths = {p for call in calls for p in (call.block, *ancestors(call.block))} | {path}
        kept_paths |= {p for p in self.blocks if path != ROOT and path in ancestors(p)}

        def leaves_it(value: Value) -> bool:
            return value.name in self.outputs or any(c not in names for c in value.consumers)

        return replace(
            self,
            inputs=tuple(v for v in used if self.values[v].producer not in names),
            outputs=tuple(v for c in calls for v in c.outputs if leaves_it(self.values[v])),
            blocks={p: b for p, b in self.blocks.items() if p in kept_paths},
            calls={call.name: call for call in calls},
            values={v: _let_go(self.values[v]) for v in used},
            executable=None,
        )

    def cuts(self, depth: int | None = None) -> list[Cut]:
        """Where the network can be cut in two, with the values and bytes that cross each place."""
        return cuts(self, depth)

    def skips(self, depth: int | None = None, *, longer_than: int = 1) -> list[Skip]:
        """Long skip connections: values used further away than the next block, furthest first."""
        return skips(self, depth, longer_than)

    def subgraph(self, blocks: Iterable[str]) -> Subgraph:
        """Some of the blocks (or calls) as an executable module with named inputs and outputs."""
        module, recording = self._running()
        return Subgraph(self, module.model, recording, {call.name for name in blocks for call in self._calls_of(name)})

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values that `from_json` reads back."""
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "training": self.training,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "output_names": list(self.output_names),
            "notes": list(self.notes),
            "blocks": [asdict(b) for b in self.blocks.values()],
            "calls": [asdict(c) for c in self.calls.values()],
            "values": [asdict(v) for v in self.values.values()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str | Path = "a graph") -> Graph:
        """The graph that `to_json` wrote.

        Raises:
            OutcoreError: it is no graph; names the place in `source`.
        """
        if check(data, MapOf(), source, OutcoreError).get("format") != FORMAT:
            raise OutcoreError(f"{source}: format is {data.get('format')!r}; this outcore reads format {FORMAT}")
        check(data, _document(), source, OutcoreError)

        def parts(kind: type[Any], rows: Iterable[Mapping[str, Any]]) -> list[Any]:
            return [kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows]

        return cls(
            model=data["model"],
            training=data["training"],
            inputs=tuple(data["inputs"]),
            outputs=tuple(data["outputs"]),
            output_names=tuple(data.get("output_names", ())),
            notes=tuple(data["notes"]),
            blocks={b.path: b for b in parts(Block, data["blocks"])},
            calls={c.name: c for c in parts(Call, data["calls"])},
            values={v.name: v for v in parts(Value, data["values"])},
        )

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read a graph written by `save`."""
        return cls.from_json(read_json(path, MapOf(), OutcoreError), path)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_of(self)

    def __str__(self) -> str:
        mode = "train" if self.training else "eval"
        size = f"{len(self.calls)} calls in {len(self.blocks)} blocks, {self.root.parameters:,} parameters"
        return f"{self.root.type} ({mode} mode): {size}, fingerprint {self.fingerprint}"

    def _running(self) -> tuple[CapturedModule, Recording]:
        if self.executable is None:
            raise OutcoreError("this graph was read from a file or is a part of another; capture the model to run it")
        return self.executable

    def _calls_of(self, name: str) -> list[Call]:
        if name in self.calls:
            return [self.calls[name]]
        return list(self.leaves(name))

    def _unknown(self, path: str) -> OutcoreError:
        return OutcoreError(f"no block {path!r} in {self.root.type}; {suggest(path, self.blocks)}")


def _let_go(value: Value) -> Value:
    """The value without what the user's own code holds: a part of a graph is replayed."""
    return value if value.held_until is None else replace(value, held_until=None)


@functools.cache
def _document() -> Record:
    """What a saved graph holds."""
    text, texts = Text(), ListOf(Text())
    rows = {name: ListOf(schema_of(kind)) for name, kind in (("blocks", Block), ("calls", Call), ("values", Value))}
    named = {"model": text, "training": Flag(), "inputs": texts, "outputs": texts, "notes": texts}
    return Record({"format": Anything(), **named, **rows}, {"output_names": texts}, open=True)
