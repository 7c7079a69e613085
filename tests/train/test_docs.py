"""The documentation: every snippet of a page runs, in order, in one empty folder; every setting is described."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from outcore.cli.main import app
from outcore.train.config import Config
from outcore.train.settings import flatten
from tests.cli.command import outcore_command

ROOT = Path(__file__).parents[2]
PAGES = ["docs/tutorial.md", "docs/design/slides.md", *(f"docs/how-to/{n}.md" for n in ("fit", "data", "split"))]
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


def test_every_setting_is_described() -> None:
    page = (ROOT / "docs/how-to/settings.md").read_text()
    missing = [name for name in flatten(Config().to_dict()) if f"`{name}`" not in page and name not in _TOGETHER]
    assert not missing
    described = re.findall(r"^\| `(\w+\.\w+)` \|", page, re.MULTILINE)
    sections = {f.name: f.type for f in dataclasses.fields(Config)}
    known = {f"{s}.{f.name}" for s in sections for f in _fields(getattr(Config(), s))}
    assert set(described) <= known


_TOGETHER = {"job", "input", "arguments"}


def _fields(section: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(section) if dataclasses.is_dataclass(section) else ()


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    shown = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "open_slide" in (tmp_path / "reference" / "data" / "index.html").read_text()


SHOWN = sorted({*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md"), *ROOT.glob("examples/*/*.yaml")})


@pytest.mark.parametrize("page", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_is_shown_would_be_understood(page: Path) -> None:
    """Commands in running text are not executed; their names and options must exist all the same."""
    command = typer.main.get_command(app)
    for line in page.read_text().splitlines():
        found = re.match(r"(?:    |\$ |# |    for .* do |.*-m )(?:\w+=\S+ )*outcore (\w+ .*)", line)
        if found is None:
            continue
        shown = re.split(r"  +#|;| {3,}", re.sub(r"^(\w+) +", r"\1 ", found[1]))[0]  # a word of explanation may follow
        words = shlex.split(shown.replace("…", "x"), comments=True)
        if "JOB" in words or "RUN" in words:
            continue
        context = typer.Context(command)
        name, inner, rest = command.resolve_command(context, words)  # type: ignore[attr-defined]
        inner.make_context(name, rest)
