"""The documentation: every snippet of a page runs, in order, in one empty folder; every setting is described."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from outcore.cli.main import app
from outcore.train.settings.config import Config
from tests.cli.command import outcore_command

ROOT = Path(__file__).parents[2]
PAGES = [
    "docs/tutorial.md",
    "docs/design/slides.md",
    *(f"docs/how-to/{n}.md" for n in ("fit", "data", "split", "schedule")),
]
SLOW = {"docs/how-to/fit.md"}


@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.slow) if p in SLOW else p for p in PAGES])
def test_snippets(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "snippet"}
    block = r"(?:^<!-- (\S+) -->\n\n)?^```(python|console)\n(.*?)^```"
    found = re.findall(block, (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found
    for file, kind, text in found:
        if file:
            (tmp_path / file).write_text(text)
        elif kind == "python":
            exec(compile(text, page, "exec"), names)
        else:
            for command in re.findall(r"^\$ outcore (.*)$", text, re.MULTILINE):
                shown = outcore_command(*shlex.split(command), folder=tmp_path)
                assert shown.returncode == 0, (command, shown.stderr)


def test_the_page_of_settings_says_what_the_code_says() -> None:
    page = (ROOT / "docs/how-to/settings.md").read_text()
    kinds = {name: type(value) for name, value in vars(Config()).items() if dataclasses.is_dataclass(value)}
    rows = re.findall(r"^\| `\w+\.\w+` \|.*$", page, re.MULTILINE)
    assert rows == [row for name, kind in kinds.items() for row in _rows(name, kind)]
    assert all(f"`{field.name}`" in page for field in dataclasses.fields(Config) if field.name not in (*kinds, "job"))


def _rows(section: str, kind: type) -> Iterator[str]:
    """A row for every field of a section, with the words below it in the source."""
    (body,) = (node for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    for line, below in itertools.pairwise([*body.body, body]):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant), (
                f"{line.target.id} of {section}"
            )
            name, words = line.target.id, str(below.value.value).replace("``", "`")
            typed = ast.unparse(line.annotation).replace("|", r"\|")
            yield f"| `{section}.{name}` | {typed} | `{getattr(kind(), name)!r}` | {words} |"


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    shown = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "open_slide" in (tmp_path / "reference" / "data" / "index.html").read_text()
    assert not list(tmp_path.rglob("*.py*")), "what makes pages is no page"


SHOWN = sorted(
    {ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md"), *ROOT.glob("examples/*/*.yaml")}
)


@pytest.mark.parametrize("page", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_is_shown_would_be_understood(page: Path) -> None:
    """Commands in running text are not executed; their names and options must exist all the same."""
    command = typer.main.get_command(app)
    for line in page.read_text().splitlines():
        found = re.match(r"(?:    |\$ |# |    for .* do |.*-m )(?:\w+=\S+ )*outcore (\w+ .*)", line)
        if found is None:
            continue
        # A word of explanation may follow.
        shown = re.split(r"  +#|;| {3,}", re.sub(r"^(\w+) {1,8}(?! )", r"\1 ", found[1]))[0]
        words = shlex.split(shown.replace("…", "x"), comments=True)
        if "JOB" in words or "RUN" in words:
            continue
        context = typer.Context(command)
        name, inner, rest = command.resolve_command(context, words)  # type: ignore[attr-defined]
        inner.make_context(name, rest)
