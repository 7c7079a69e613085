"""The tree of blocks, one-to-one with the user's modules, with functions in between."""

from __future__ import annotations

from outcore.graph.naming import kind_of
from outcore.graph.parts import ROOT, Block, parent
from outcore.graph.record.recorder import Recorder
from outcore.graph.source import definition

__all__ = ["blocks_of"]


def blocks_of(recorder: Recorder) -> dict[str, Block]:
    """All blocks of a recorded model by path: the model first, each block before the blocks inside it."""
    model = recorder.model
    modules = dict(model.named_modules())
    others: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        others.setdefault(id(module), []).append(name)

    children: dict[str, list[str]] = {}
    for path in dict.fromkeys((*recorder.kinds, *modules)):
        for ancestor in _line(path):
            siblings = children.setdefault(parent(ancestor), [])
            if ancestor not in siblings:
                siblings.append(ancestor)

    found: dict[str, Block] = {}

    waiting = [ROOT]
    while waiting:  # no inner function that calls itself: it would keep the model alive until garbage is collected
        path = waiting.pop()
        module = modules.get(path)
        called = recorder.kinds.get(path)
        kind, type_ = called or (
            kind_of(module) if module is not None else "container",
            type(module).__name__,
        )
        inside = tuple(children.get(path, ())) if kind == "container" else ()
        parameters = {id(p): p.numel() for p in module.parameters()} if module is not None else {}
        found[path] = Block(
            path=path,
            kind=kind,
            type=type_,
            detail=module.extra_repr() if module is not None else _detail(recorder, path),
            children=inside,
            calls=recorder.counts[path],
            parameters=sum(parameters.values()),
            source=definition(type(model).forward) if path == ROOT else recorder.sources.get(path, ""),
            aliases=tuple(n for n in others.get(id(module), ()) if n != path),
        )
        waiting.extend(reversed(inside))
    return found


def _line(path: str) -> list[str]:
    """The path and those of the blocks around it, outermost first, without the whole model."""
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _detail(recorder: Recorder, path: str) -> str:
    call = recorder.calls.get(f"{path}#0")
    return call.detail if call else ""
