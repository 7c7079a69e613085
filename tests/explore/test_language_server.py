"""The language server over its own protocol, asked by a client as an editor would."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pygls")

from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient

from outcore.cost.costs import total
from outcore.cost.profile import profile
from outcore.explore.language_server import OPTIONS
from outcore.job import Job
from outcore.machine import format_bytes, format_time, parse
from tests.explore.jobs import SMALL, line_of, write
from tests.foreign.sample import sometimes

PATIENCE_S = 90


class Editor(LanguageClient):
    """A client that keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__("editor", "1")
        self.refreshed = asyncio.Event()
        self.diagnostics: dict[str, list[lsp.Diagnostic]] = {}

        @self.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def published(params: lsp.PublishDiagnosticsParams) -> None:
            self.diagnostics[params.uri] = list(params.diagnostics)

        @self.feature(lsp.WORKSPACE_INLAY_HINT_REFRESH)
        def hints(params: Any) -> None:
            return None

        @self.feature(lsp.WORKSPACE_CODE_LENS_REFRESH)
        def lenses(params: Any) -> None:
            self.refreshed.set()

    async def settled(self) -> None:
        await asyncio.wait_for(self.refreshed.wait(), PATIENCE_S)
        self.refreshed.clear()


def edit(path: Path, options: dict[str, Any], act: Callable[[Editor, str], Awaitable[None]]) -> None:
    """Open a file in an editor, wait until the server has looked at it, and act."""

    async def session() -> None:
        editor = Editor()
        await editor.start_io(sys.executable, "-m", "outcore", "lsp", env=dict(os.environ))
        try:
            can = lsp.ClientCapabilities(
                workspace=lsp.WorkspaceClientCapabilities(
                    inlay_hint=lsp.InlayHintWorkspaceClientCapabilities(refresh_support=True),
                    code_lens=lsp.CodeLensWorkspaceClientCapabilities(refresh_support=True),
                )
            )
            params = lsp.InitializeParams(
                capabilities=can, root_uri=path.parent.as_uri(), initialization_options=options
            )
            await editor.initialize_async(params)
            editor.initialized(lsp.InitializedParams())
            item = lsp.TextDocumentItem(uri=path.as_uri(), language_id="python", version=1, text=path.read_text())
            editor.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
            await editor.settled()
            await act(editor, path.as_uri())
            await editor.shutdown_async(None)
            editor.exit(None)
        finally:
            if editor._server is not None and editor._server.returncode is None:
                editor._server.kill()  # else a failed test would wait for it
            await asyncio.wait_for(editor.stop(), 10)

    asyncio.run(session())


async def hints_of(editor: Editor, uri: str) -> dict[int, str]:
    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(10_000, 0))
    found = await editor.text_document_inlay_hint_async(lsp.InlayHintParams(lsp.TextDocumentIdentifier(uri), whole))
    return {hint.position.line + 1: str(hint.label) for hint in found or ()}


@sometimes
def test_lines_of_forward_have_hints_a_hover_and_a_lens(tmp_path: Path) -> None:
    path = write(tmp_path)
    shown = profile(Job.load(str(path)), parse("v100").devices[0])
    first = total(c for name, c in shown.costs.calls.items() if name.startswith("first."))
    line = line_of(SMALL, "a = self.first(image)")

    async def act(editor: Editor, uri: str) -> None:
        hints = await hints_of(editor, uri)
        expected = {
            line_of(SMALL, w) for w in ("self.first(image)", "self.second(a)", "torch.cat", "F.relu", "F.cross")
        }
        assert set(hints) == expected
        assert hints[line].startswith(f"{format_time(first.time_s)} · {format_bytes(first.saved_bytes)}")
        at = lsp.HoverParams(lsp.TextDocumentIdentifier(uri), lsp.Position(line - 1, 10))
        hover = await editor.text_document_hover_async(at)
        assert hover is not None and isinstance(hover.contents, lsp.MarkupContent)
        assert "4×32×64×64" in hover.contents.value and format_time(first.backward_s) in hover.contents.value
        nothing = lsp.HoverParams(lsp.TextDocumentIdentifier(uri), lsp.Position(0, 0))
        assert await editor.text_document_hover_async(nothing) is None
        lenses = await editor.text_document_code_lens_async(lsp.CodeLensParams(lsp.TextDocumentIdentifier(uri)))
        assert lenses and lenses[0].command is not None
        assert f"{shown.per_second:,.1f} samples/s" in lenses[0].command.title
        assert not any(editor.diagnostics.values())

    edit(path, {"machine": "v100"}, act)


@pytest.mark.slow
def test_lines_that_were_edited_show_nothing_until_the_file_is_saved(tmp_path: Path) -> None:
    path = write(tmp_path)
    line = line_of(SMALL, "a = self.first(image)")

    async def act(editor: Editor, uri: str) -> None:
        hints = await hints_of(editor, uri)

        def show(text: str, version: int) -> None:
            change = lsp.TextDocumentContentChangeWholeDocument(text)
            document = lsp.VersionedTextDocumentIdentifier(uri=uri, version=version)
            editor.text_document_did_change(lsp.DidChangeTextDocumentParams(document, [change]))

        show("# a new first line\n" + SMALL, 2)  # not saved: no line shows what belongs to another
        assert not await hints_of(editor, uri)
        wider = SMALL.replace("Block(32, 32)", "Block(32, 48)").replace("Conv2d(64, 2, 1)", "Conv2d(80, 2, 1)")
        show(wider, 3)
        path.write_text(wider)
        editor.text_document_did_save(lsp.DidSaveTextDocumentParams(lsp.TextDocumentIdentifier(uri)))
        await editor.settled()
        again = await hints_of(editor, uri)
        second = line_of(SMALL, "self.second(a)")
        assert again[line] == hints[line] and again[second] != hints[second]

    edit(path, {"machine": "v100"}, act)


@pytest.mark.slow
def test_too_small_a_budget_and_an_error_are_diagnostics(tmp_path: Path) -> None:
    path = write(tmp_path)

    async def act(editor: Editor, uri: str) -> None:
        [over] = editor.diagnostics[uri]
        assert over.severity == lsp.DiagnosticSeverity.Warning and "more than 5.0 MiB" in over.message
        assert SMALL.splitlines()[over.range.start.line].strip()
        broken = SMALL.replace("self.second(a)", "self.missing(a)")
        path.write_text(broken)
        editor.text_document_did_save(lsp.DidSaveTextDocumentParams(lsp.TextDocumentIdentifier(uri)))
        await editor.settled()
        [error] = editor.diagnostics[uri]
        assert error.severity == lsp.DiagnosticSeverity.Error and "missing" in error.message
        assert error.range.start.line + 1 == line_of(broken, "self.missing(a)")
        path.write_text(SMALL)
        editor.text_document_did_save(lsp.DidSaveTextDocumentParams(lsp.TextDocumentIdentifier(uri)))
        await editor.settled()
        assert [d.severity for d in editor.diagnostics[uri]] == [lsp.DiagnosticSeverity.Warning]

    edit(path, {"machine": "v100", "memory": "5MiB"}, act)


def test_the_configurations_in_the_docs_name_the_command_and_settings_that_there_are() -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "editor.md").read_text()
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL))
    helix, code = tomllib.loads(blocks["toml"])["language-server"]["outcore"], json.loads(blocks["json"])
    assert [helix["command"], *helix["args"]] == ["outcore", "lsp"]
    assert [code["glspc.server.command"], *code["glspc.server.commandArguments"]] == ["outcore", "lsp"]
    assert 'cmd = { "outcore", "lsp" }' in blocks["lua"]
    given = {*helix["config"], *code["glspc.server.initializationOptions"]}
    listed = set(re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE))
    assert given <= set(OPTIONS) and set(re.findall(r"`(\w+)`", " ".join(listed))) == set(OPTIONS)
