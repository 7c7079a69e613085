"""The blocks of a graph as a tree for the terminal, with what each makes, holds and is.

Identical neighbours are one line, ``1 … 5  Bottleneck × 5``. The columns that matter (output, parameters) are
always whole; settings are cut where the terminal ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from outcore.graph.graph import Graph
from outcore.graph.parts import ROOT, Block, Call, ancestors
from outcore.report.graph_drawing.labels import shape_label, summary
from outcore.report.graph_drawing.repeated_blocks import signatures

__all__ = ["Tree", "tree"]

WIDEST_SHAPE = 26
GAP = 2


def tree(
    graph: Graph,
    *,
    depth: int | None = 2,
    expand: Iterable[str] = (),
    functions: bool = True,
    fold: bool = True,
) -> Tree:
    """The blocks of a graph as something `rich` prints.

        rich.print(tree(outcore.capture(model, images), depth=1, expand=["layer4"]))

    Args:
        graph: the network.
        depth: 1 shows the model's own children, 2 theirs, None everything.
        expand: blocks whose children are shown beyond `depth`.
        functions: also list functions.
        fold: list identical neighbours once.
    """
    if depth is not None and depth < 1:
        raise ValueError(f"depth must be at least 1 (the model's own children), not {depth}")
    wanted = {p for path in expand for p in (*ancestors(path), graph[path].path)}
    return Tree(graph, list(_Rows(graph, depth, wanted, functions, fold).lines()))


class Tree:
    """Lines of a tree, as wide as the terminal when they are printed."""

    def __init__(self, graph: Graph, lines: list[_Line]) -> None:
        self.graph, self.lines = graph, lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [self._numbers(line.block) for line in self.lines]
        often = any(b.calls > 1 for b in self.graph.blocks.values() if b.kind != "function")
        heads = ["output", "parameters", "calls"][: 2 + often]
        widths = [max(len(head), *(len(row[i]) for row in cells)) for i, head in enumerate(heads[1:])]
        shape = min(WIDEST_SHAPE, max(6, *(len(line.shape) for line in self.lines)))
        room = options.max_width - sum(widths) - shape - GAP * len(heads)
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("block", no_wrap=True, overflow="ellipsis", max_width=max(room, 20))
        table.add_column("output", no_wrap=True, overflow="ellipsis", max_width=shape)
        for head in heads[1:]:
            table.add_column(head, no_wrap=True, justify="right")
        for line, numbers in zip(self.lines, cells, strict=True):
            dim = line.block.kind == "function" or not line.called
            table.add_row(line.text, line.shape, *numbers[: len(widths)], style="dim" if dim else "")
        yield table
        yield from (Text(f"note: {note}", style="dim") for note in self.graph.notes)

    @staticmethod
    def _numbers(block: Block) -> list[str]:
        return [
            f"{block.parameters:,}" if block.parameters else "",
            str(block.calls) if block.calls > 1 else "",
        ]


@dataclass(frozen=True, slots=True)
class _Line:
    text: Text
    shape: str
    block: Block
    called: bool


class _Rows:
    def __init__(self, graph: Graph, depth: int | None, wanted: set[str], functions: bool, fold: bool) -> None:
        self.graph, self.depth, self.wanted = graph, depth, wanted
        self.functions, self.fold = functions, fold
        self.identical = signatures(graph)
        self.shapes = _output_shapes(graph)
        self.reached = {p for call in graph.calls.values() for p in (ROOT, *ancestors(call.block), call.block)}

    def lines(self) -> Iterator[_Line]:
        root = self.graph.root
        mode = "train mode" if self.graph.training else "eval mode"
        yield _Line(Text.assemble((root.type, "bold"), (f" ({mode})", "dim")), self.shapes.get(ROOT, ""), root, True)
        yield from self._below(ROOT, "")

    def _below(self, path: str, guide: str) -> Iterator[_Line]:
        groups = self._groups(path)
        for i, group in enumerate(groups):
            block, last = group[0], i == len(groups) - 1
            text = self._text(group, guide + ("└─ " if last else "├─ "))
            yield _Line(text, self.shapes.get(block.path, ""), block, block.path in self.reached)
            if self.depth is None or block.depth < self.depth or block.path in self.wanted:
                yield from self._below(block.path, guide + ("   " if last else "│  "))

    def _text(self, group: list[Block], guide: str) -> Text:
        block = group[0]
        name = block.name if len(group) == 1 else f"{block.name} … {group[-1].name}"
        line = Text.assemble((guide, "dim"), (name, "bold" if block.kind != "function" else ""))
        if block.kind != "function":
            line.append(f"  {block.type}")
        if len(group) > 1:
            line.append(f" × {len(group)}", "bold")
        if block.path not in self.reached:
            line.append("  never called")
        elif detail := summary(block.type, block.detail) or block.detail:
            line.append(f"  {detail}", "dim")
        return line

    def _groups(self, path: str) -> list[list[Block]]:
        """Children of a block, identical neighbours together; none that was expanded by name."""
        found: list[list[Block]] = []
        for child in self.graph[path].children:
            block = self.graph[child]
            if block.kind == "function" and not self.functions:
                continue
            alike = bool(found) and self._kind(found[-1][0]) == self._kind(block)
            if self.fold and alike and block.kind != "function" and self.wanted.isdisjoint((child, found[-1][0].path)):
                found[-1].append(block)
            else:
                found.append([block])
        return found

    def _kind(self, block: Block) -> tuple[int, str]:
        return self.identical[block.path], self.shapes.get(block.path, "")


def _is_inside(call: Call, path: str, scope: str) -> bool:
    """Whether a call happens in one call of a block; a block that is called again reads from outside of the first."""
    return scope in (*call.scope, call.name) if call.scope else path in (call.block, *ancestors(call.block))


def _output_shapes(graph: Graph) -> dict[str, str]:
    """What each block makes in its first call: values that are read outside it or that the model returns."""
    found: dict[str, dict[str, None]] = {}
    first: dict[str, str] = {}
    for call in graph.calls.values():
        around = [*call.scope, call.name] if call.scope else [*(f"{p}#0" for p in ancestors(call.block)), call.name]
        paths = {scope.rpartition("#")[0]: scope for scope in around}
        for path, scope in paths.items():
            first.setdefault(path, scope)
        for name in call.outputs:
            value = graph.values[name]
            for path, scope in paths.items():
                inside = first[path] == scope
                read = any(not _is_inside(graph.calls[c], path, scope) for c in value.consumers)
                if inside and (read or name in graph.outputs):
                    found.setdefault(path, {})[shape_label(value.shape)] = None
            if name in graph.outputs:
                found.setdefault(ROOT, {})[shape_label(value.shape)] = None
    return {path: ", ".join(shapes) for path, shapes in found.items()}
