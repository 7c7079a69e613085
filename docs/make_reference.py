"""Writes docs/reference from the docstrings: plain Markdown, readable where the repository is read.

    python docs/make_reference.py            writes the pages
    python docs/make_reference.py --check    says which are not current, and ends with 1

The pages are committed, and a test compares them. Only names that a user imports are listed; a class is shown with its
public methods and properties.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "reference"

KERAS = (
    "to_torch",
    "write_back",
    "from_torch",
    "save_weights",
    "load_weights",
    "within",
    "stream",
    "TensorFlowPlan",
    "Adam",
    "AdamW",
    "optimizer_of",
)
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "outcore": (
        "outcore",
        (
            "Job",
            "capture",
            "Graph",
            "estimate",
            "measure",
            "Costs",
            "memory_of",
            "plan",
            "Plan",
            "within",
            "release",
            "memory_plan",
            "gradient_effect",
        ),
    ),
    "data": (
        "outcore.data",
        (
            "open_slide",
            "Slide",
            "Batch",
            "Source",
            "read_table",
            "read_folder",
            "Scene",
            "write_slide",
            "write_slides",
            "write_volume",
        ),
    ),
    "stream": ("outcore.stream", ("stream", "plan_tiles", "StreamPlan")),
    "spatial": ("outcore.spatial", ("plan_grid", "measure_part", "PartGrid", "VirtualRanks")),
    "run": ("outcore.run", ("Engine", "EngineSettings", "launch", "measure_link", "read_weights")),
    "fuse": ("outcore", ("fuse",)),
    "whatif": ("outcore.whatif", ("ask", "Answers", "Answer", "record", "RecordedStep", "Task", "SimulatedStep")),
    "keras": ("outcore.keras", KERAS),
    "scan": ("outcore.scan", ("RNN", "GRU", "LSTM", "convert", "Options")),
}


def page(name: str) -> str:
    """One page."""
    module_name, names = PAGES[name]
    module = importlib.import_module(module_name)
    title = f"outcore.{name}" if name != "outcore" else name
    parts = [f"# {title}", "<!-- Made by docs/make_reference.py from the docstrings; change those. -->"]
    if name != "fuse" and (about := inspect.getdoc(module)):
        parts.append(about.partition("\n\n")[0])
    for each in names:
        parts += described(f"{module_name}.{each}", getattr(module, each))
    if name == "fuse":
        parts += described("FusedArray", array_of(module.fuse))
    return "\n\n".join(parts).rstrip() + "\n"


def array_of(fuse: Any) -> Any:
    """The class that `outcore.fuse` returns."""
    made = inspect.signature(fuse).return_annotation
    return getattr(sys.modules[fuse.__module__], made) if isinstance(made, str) else made


def described(name: str, thing: Any) -> list[str]:
    """A function or class, with what can be used of it."""
    if not inspect.isclass(thing):
        return [f"## {name}", signature(name.rpartition(".")[2], thing), text(inspect.getdoc(thing) or "")]
    made = [f"## {name}", signature(thing.__name__, thing), text(inspect.getdoc(thing) or "")]
    for member, value in inspect.getmembers_static(thing):
        put_there = getattr(value, "hooked", False)  # torch's, on an optimizer's class when the first one is made
        if member.startswith("_") or member not in vars(thing) or put_there:
            continue
        plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(plain, property):
            kind, shown = "property", f"```python\n{thing.__name__}.{member}{returned(plain.fget)}\n```"
        elif inspect.isfunction(plain):
            kind = "class method" if isinstance(value, classmethod) else "method"
            shown = signature(f"{thing.__name__}.{member}", plain)
        else:
            continue
        about = inspect.getdoc(plain) or ""
        made += [f"### {member} ({kind})", shown, text(about)]
    return made


def signature(name: str, thing: Any) -> str:
    """How it is called, one argument a line where it is long."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return f"```python\n{name}(...)\n```"
    kept = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    found = found.replace(
        parameters=[p.replace(default=_Shown(p.default)) if p.default is not p.empty else p for p in kept]
    )
    line = f"{name}{found}"
    line = re.sub(r"(?<=[:>] )'([^']*)'", r"\1", line)
    if len(line) > 100:
        inside, _, after = line.removeprefix(name)[1:].rpartition(")")
        arguments = ",\n".join(f"    {one}" for one in split(inside))
        line = f"{name}(\n{arguments},\n){after}"
    return f"```python\n{line}\n```"


class _Shown:
    """A default as it is written, without addresses in memory."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        if inspect.isfunction(self.value) or inspect.isclass(self.value):
            return str(self.value.__name__)
        return "…" if " at 0x" in repr(self.value) or repr(self.value).startswith("<") else repr(self.value)


def split(arguments: str) -> list[str]:
    """Arguments at the commas that are inside of no bracket.

    >>> split("a: tuple[int, int], b: str = ','")
    ['a: tuple[int, int]', "b: str = ','"]
    """
    found, depth, quoted = [""], 0, ""
    for letter in arguments:
        quoted = ("" if quoted == letter else quoted) if quoted else letter if letter in "'\"" else ""
        depth += 0 if quoted else (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth and not quoted:
            found.append("")
        else:
            found[-1] += letter
    return [one.strip() for one in found if one.strip()]


def returned(function: Any) -> str:
    """`` -> int`` where it is said."""
    made = inspect.signature(function).return_annotation
    return "" if made is inspect.Signature.empty else f" -> {made if isinstance(made, str) else made.__name__}"


def text(docstring: str) -> str:
    """A docstring as Markdown: sections as lists, examples fenced."""
    made: list[str] = []
    for part in re.split(r"\n(?=(?:Args|Returns|Raises|Yields):\n)", docstring.strip()):
        head, _, body = part.partition("\n")
        if head in ("Args:", "Raises:"):
            made.append(f"**{head[:-1]}**\n\n{items(body)}")
        elif head in ("Returns:", "Yields:"):
            made.append(f"**{head[:-1]}**\n\n{paragraphs(textwrap.dedent(body))}")
        else:
            made.append(paragraphs(part))
    return "\n\n".join(one for one in made if one.strip())


def items(body: str) -> str:
    """``name: what it is`` as a list; what follows the list is text again."""
    lines, rest = textwrap.dedent(body).rstrip().split("\n"), ""
    if "" in lines and (end := next((i for i, line in enumerate(lines) if not line), None)) is not None:
        lines, rest = lines[:end], "\n\n" + paragraphs("\n".join(lines[end:]).strip())
    found: list[str] = []
    for line in lines:
        name, colon, about = line.partition(":")
        if colon and not line.startswith(" ") and re.fullmatch(r"[\w*, ]+", name):
            found.append(f"- `{name}`: {about.strip()}")
        elif found:
            found[-1] += f" {line.strip()}"
        else:
            found.append(line.strip())
    return "\n".join(found) + rest


def paragraphs(body: str) -> str:
    """Paragraphs, those that begin with a prompt fenced; what is indented is code already."""
    found = []
    for one in re.split(r"\n\s*\n", body.strip("\n")):
        found.append(f"```pycon\n{textwrap.dedent(one)}\n```" if one.lstrip().startswith(">>> ") else one)
    return "\n\n".join(found)


def main(words: list[str]) -> int:
    """Write or check all pages."""
    made = {FOLDER / f"{name}.md": page(name) for name in PAGES}
    old = [path for path, content in made.items() if not path.is_file() or path.read_text() != content]
    if "--check" in words:
        for path in old:
            print(f"{path.relative_to(FOLDER.parent.parent)} is not current; run: python docs/make_reference.py")
        return 1 if old else 0
    for path in old:
        path.write_text(made[path])
        print(f"wrote {path.relative_to(FOLDER.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
