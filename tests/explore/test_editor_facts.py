"""What an editor is told of a job's lines, without an editor: facts of a file, and which still hold after an edit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pygls")

from lsprotocol import types as lsp

import outcore
from outcore.cost.costs import total
from outcore.cost.profile import profile
from outcore.explore import language_server
from outcore.explore.editor_facts import editor_facts
from outcore.explore.language_server import EditorSession
from outcore.explore.parts import ExploreSettings
from outcore.job import Job
from outcore.machine import format_bytes, format_rate, format_time, parse
from tests.explore.jobs import SMALL, line_of, write


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("job")).resolve()


@pytest.fixture(scope="module")
def facts(path: Path) -> dict[str, Any]:
    return editor_facts(ExploreSettings(job=str(path), machine="v100", memory="5MiB"))


def test_a_line_has_the_costs_of_its_blocks(path: Path, facts: dict[str, Any]) -> None:
    shown = profile(Job.load(str(path)), parse("v100").devices[0])
    first = total(c for name, c in shown.costs.calls.items() if name.startswith("first."))
    rows = {row["line"]: row for row in facts["files"][str(path)]["lines"]}
    row = rows[line_of(SMALL, "a = self.first(image)")]
    assert row["hint"] == f"{format_time(first.time_s)} · {format_bytes(first.saved_bytes)}"
    assert row["share"] == pytest.approx(first.time_s / shown.costs.total().time_s)
    assert row["over_bytes"] == first.saved_bytes
    for words in (
        f"**{format_time(first.time_s)}** of forward and backward, {row['share']:.1%} of the network",
        f"| forward | {format_time(first.forward_s)} |",
        f"| backward | {format_time(first.backward_s)} |",
        f"| saved for backward | {format_bytes(first.saved_bytes)} |",
        f"| workspace | {format_bytes(first.workspace_bytes)} |",
        f"| parameters | {format_bytes(first.parameter_bytes)} |",
        f"| matrix work | {format_rate(first.flops_forward + first.flops_backward, 'FLOP')} |",
        "- `first` Block → 4×32×64×64",
    ):
        assert words in row["hover"]


def test_a_function_called_on_several_lines_has_on_each_the_shapes_of_that_line(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(_TWICE)
    (rows,) = (
        {row["line"]: row["hover"] for row in file["lines"]}
        for file in editor_facts(ExploreSettings(job=str(job)))["files"].values()
    )
    for line, shape in (("x = self.a(x).relu()", "1×3×8×8"), ("x = self.b(x).relu()", "1×5×8×8")):
        assert rows[line_of(_TWICE, line)].endswith(f"`relu()` relu → {shape}")


_TWICE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 3, 1), nn.Conv2d(3, 5, 1)

    def forward(self, x):
        x = self.a(x).relu()
        x = self.b(x).relu()
        return x.mean((1, 2, 3))

model = Net

def batch(size):
    return torch.rand(size, 1, 8, 8), None
"""


def test_the_function_around_the_slowest_line_comes_first(path: Path, facts: dict[str, Any]) -> None:
    found = facts["files"][str(path)]
    slowest = max(found["lines"], key=lambda row: row["share"])["line"]
    before = [n for n, row in enumerate(SMALL.splitlines(), 1) if row.lstrip().startswith("def ") and n <= slowest]
    assert found["functions"][0] == before[-1]
    assert all(SMALL.splitlines()[n - 1].lstrip().startswith("def ") for n in found["functions"])
    assert len(set(found["functions"])) == len(found["functions"])


def test_the_summary_says_rate_step_peak_and_whether_that_fits(path: Path, facts: dict[str, Any]) -> None:
    shown, summary = profile(Job.load(str(path)), parse("v100").devices[0]), facts["summary"]
    peak = shown.memory.peak_bytes
    assert summary["peak_bytes"] == peak > summary["budget_bytes"] == 5 << 20 and summary["over"]
    assert f"{shown.per_second:,.1f} samples/s · step {format_time(shown.step.step_s)}" in summary["lens"]
    assert f"peak {format_bytes(peak)} of 5.0 MiB · batch {shown.size} on" in summary["lens"]
    assert f"takes {format_bytes(peak)}, {format_bytes(peak - (5 << 20))} more than 5.0 MiB" in summary["message"]
    assert shown.memory.peak.call in summary["message"] and summary["file"] == str(path)
    assert SMALL.splitlines()[summary["line"] - 1].strip()
    whole = editor_facts(ExploreSettings(job=str(path), machine="v100"))["summary"]
    assert not whole["over"] and whole["budget_bytes"] == parse("v100").devices[0].memory_bytes


class Server(SimpleNamespace):
    """An editor's side of the protocol: the text it shows, and what it was told."""

    def __init__(self, refreshes: bool = True) -> None:
        hint = lsp.InlayHintWorkspaceClientCapabilities(refresh_support=refreshes)
        lens = lsp.CodeLensWorkspaceClientCapabilities(refresh_support=refreshes)
        self.client_capabilities = SimpleNamespace(workspace=SimpleNamespace(inlay_hint=hint, code_lens=lens))
        self.shown: dict[str, str] = {}
        self.told: list[lsp.PublishDiagnosticsParams] = []
        self.refreshed: list[str] = []
        self.workspace = SimpleNamespace(get_text_document=lambda uri: SimpleNamespace(source=self.shown[uri]))
        self.text_document_publish_diagnostics = self.told.append

    async def workspace_inlay_hint_refresh_async(self, _: None) -> None:
        self.refreshed.append("hints")

    async def workspace_code_lens_refresh_async(self, _: None) -> None:
        self.refreshed.append("lenses")


def looked(server: Server, path: Path, answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> EditorSession:
    """A session in which a job was looked at as often as there are answers."""
    session = EditorSession(server)  # type: ignore[arg-type]
    session.configure({"machine": "v100", "seconds": 7, "memory": None, "other": 1}, str(path.parent))
    asked: list[Any] = []

    async def answer_of(module: str, given: dict[str, Any], *, seconds: float, folder: str) -> Any:
        asked.append((module, given, seconds, folder))
        return answers[len(asked) - 1]

    monkeypatch.setattr(language_server, "answer_of", answer_of)

    async def look() -> None:
        for _ in answers:
            session.look(path)
            await session.running[str(path)]

    asyncio.run(look())
    expected = ("outcore.explore.editor_facts", {"machine": "v100", "job": str(path)}, 7.0, str(path.parent))
    assert asked == [expected] * len(answers)
    return session


def test_rows_that_were_edited_since_are_left_out(path: Path, facts: dict[str, Any], monkeypatch: Any) -> None:
    server = Server()
    session = looked(server, path, [(facts, "")], monkeypatch)
    server.shown[path.as_uri()] = SMALL
    rows, line = session.rows(path.as_uri()), line_of(SMALL, "a = self.first(image)")
    assert set(rows) == {row["line"] for row in facts["files"][str(path)]["lines"]}
    assert rows[line]["width"] == len(SMALL.splitlines()[line - 1])
    server.shown[path.as_uri()] = SMALL.replace("a = self.first(image)", "a = self.first(image) ")
    assert set(session.rows(path.as_uri())) == set(rows) - {line}
    server.shown[path.as_uri()] = "\n".join(SMALL.splitlines()[:line])
    assert set(session.rows(path.as_uri())) == {number for number in rows if number <= line}
    assert session.rows("untitled:1") == {} and session.rows((path.parent / "other.py").as_uri()) == {}
    assert server.refreshed == ["hints", "lenses"]


def test_diagnostics_are_of_the_peak_or_the_error_and_go_with_it(
    path: Path, facts: dict[str, Any], monkeypatch: Any
) -> None:
    trouble = {"trouble": {"file": str(path), "line": 3, "message": "no such layer"}}
    fits = {**facts, "summary": facts["summary"] | {"over": False}}
    answers = [(facts, ""), (trouble, ""), (None, "time"), (None, "exit status 3"), (fits, "")]
    server = Server(refreshes=False)
    looked(server, path, answers, monkeypatch)
    found = [[(d.severity, d.range.start.line, d.message) for d in told.diagnostics] for told in server.told]
    assert {told.uri for told in server.told} == {path.as_uri()} and not server.refreshed
    warning, error = lsp.DiagnosticSeverity.Warning, lsp.DiagnosticSeverity.Error
    assert found == [
        [(warning, facts["summary"]["line"] - 1, facts["summary"]["message"])],
        [(error, 2, "outcore: no such layer")],
        [(error, 0, f"outcore: {path} was not recorded within 7 s")],
        [(error, 0, f"outcore: the process of {path} ended with exit status 3")],
        [],
    ]


def test_a_file_is_a_job_if_it_has_a_model_and_batches_or_is_named(path: Path, tmp_path: Path) -> None:
    session = EditorSession(Server())  # type: ignore[arg-type]
    assert session.job_of(path) == str(path)
    (tmp_path / "half.py").write_text("def model():\n    ...\n")
    assert session.job_of(tmp_path / "half.py") is None and session.job_of(tmp_path / "none.py") is None
    session.files[str(tmp_path / "half.py")] = {"job": str(path)}
    assert session.job_of(tmp_path / "half.py") == str(path), "it belongs to a job that was looked at"
    session.configure({"job": "job.py"}, str(tmp_path))
    assert session.job_of(path) == str(tmp_path / "job.py")
    session.configure({"job": "package.module:Class"}, None)
    assert session.job_of(path) == "package.module:Class"


@pytest.mark.parametrize(("refreshes", "waits"), [(True, False), (False, True)])
def test_an_editor_that_cannot_be_told_of_hints_waits_for_them(path: Path, refreshes: bool, waits: bool) -> None:
    session = EditorSession(Server(refreshes))  # type: ignore[arg-type]

    async def ask() -> bool:
        session.running[str(path)] = task = asyncio.create_task(asyncio.sleep(0.01))
        await session.settled(path.as_uri())
        done = task.done()
        await task
        return done

    assert asyncio.run(ask()) == waits


class Features(dict[str, Any]):
    """What a language server answers, by the name of the request."""

    def __init__(self, *_: str) -> None:
        super().__init__()

    def feature(self, name: str) -> Any:
        return lambda handler: self.setdefault(name, handler)


def test_an_editor_gets_hints_in_its_range_a_hover_on_a_line_and_one_lens(
    path: Path, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Server()
    shown.shown[path.as_uri()] = SMALL
    session = looked(shown, path, [(facts, "")], monkeypatch)
    monkeypatch.setattr("pygls.lsp.server.LanguageServer", Features)
    monkeypatch.setattr(language_server, "EditorSession", lambda _: session)
    answer: Any = language_server.language_server()
    document, other = (lsp.TextDocumentIdentifier(p.as_uri()) for p in (path, path.parent / "other.py"))
    rows = {row["line"]: row for row in facts["files"][str(path)]["lines"]}
    first, last = sorted(rows)[1], sorted(rows)[-2]

    asked = lsp.Range(lsp.Position(first - 1, 0), lsp.Position(last - 1, 0))
    hints = asyncio.run(answer[lsp.TEXT_DOCUMENT_INLAY_HINT](lsp.InlayHintParams(document, asked)))
    assert [hint.position.line + 1 for hint in hints] == [line for line in rows if first <= line <= last]
    for hint in hints:
        row = rows[hint.position.line + 1]
        assert hint.label == row["hint"] + (" ◀" if row["share"] >= 0.15 else "")
        assert hint.position.character == len(SMALL.splitlines()[row["line"] - 1]) and hint.padding_left
        assert hint.tooltip.value == row["hover"] and hint.tooltip.kind == lsp.MarkupKind.Markdown
    assert {hint.label.endswith("◀") for hint in hints} == {True, False}

    def hover(line: int) -> Any:
        return answer[lsp.TEXT_DOCUMENT_HOVER](lsp.HoverParams(document, lsp.Position(line - 1, 0)))

    assert hover(first).contents.value == rows[first]["hover"] and hover(1) is None
    (lens,) = answer[lsp.TEXT_DOCUMENT_CODE_LENS](lsp.CodeLensParams(document))
    assert lens.command.title == facts["summary"]["lens"]
    assert lens.range.start.line + 1 == facts["files"][str(path)]["functions"][0]
    assert answer[lsp.TEXT_DOCUMENT_CODE_LENS](lsp.CodeLensParams(other)) == []


def test_a_file_is_looked_at_when_it_is_opened_first_and_whenever_it_is_saved(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, seen = EditorSession(Server()), list[Path]()  # type: ignore[arg-type]
    monkeypatch.setattr("pygls.lsp.server.LanguageServer", Features)
    monkeypatch.setattr(language_server, "EditorSession", lambda _: session)
    monkeypatch.setattr(session, "look", seen.append)
    answer: Any = language_server.language_server()
    for root in (tmp_path.as_uri(), None):
        options = {"machine": "v100", "memory": None}
        given = lsp.InitializeParams(lsp.ClientCapabilities(), root_uri=root, initialization_options=options)
        answer[lsp.INITIALIZE](given)
        assert session.options == {"machine": "v100"} and session.root == tmp_path.resolve()

    def opened(uri: str) -> None:
        item = lsp.TextDocumentItem(uri, "python", 1, "")
        asyncio.run(answer[lsp.TEXT_DOCUMENT_DID_OPEN](lsp.DidOpenTextDocumentParams(item)))

    def saved(uri: str) -> None:
        document = lsp.TextDocumentIdentifier(uri)
        asyncio.run(answer[lsp.TEXT_DOCUMENT_DID_SAVE](lsp.DidSaveTextDocumentParams(document)))

    opened(path.as_uri())
    session.files[str(path)] = {"job": str(path)}
    opened(path.as_uri())  # what is known is not looked at again
    assert seen == [path]
    saved(path.as_uri())
    opened("untitled:1")
    saved("untitled:1")
    assert seen == [path, path]


def test_the_server_tells_editors_its_own_version() -> None:
    server = language_server.language_server()
    assert server.protocol.server_info == lsp.ServerInfo(name="outcore", version=outcore.__version__)
