"""A language server: what lines of a job take, shown in any editor while it is written.

    inlay hint    `x = self.layer1(x)   25.8 ms · 1.96 GiB`      time of forward and backward, memory saved for backward
    hover         the breakdown of a line, and the shapes that its blocks return
    code lens     above `forward`: throughput, step, peak memory
    diagnostic    where the peak exceeds the budget, and where the job fails

A file is a job if it has ``model()`` and ``batch(size)``, or if the settings name it; settings come with the editor's
``initialize`` request: ``job``, ``machine``, ``memory``, ``batch``, ``inputs``, ``arguments``, ``seconds``. The job is
run in a process of its own when a file is opened or saved (`outcore.explore.editor_facts`), and ended when it takes too
long; until another answer is there the last one stays. Lines that were edited since show nothing rather than what
belonged to another line. An editor that cannot be told of new hints (Helix) gets its answer when they are there.
This process never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from outcore.explore.child_process import answer_of

if TYPE_CHECKING:
    from lsprotocol import types as lsp
    from pygls.lsp.server import LanguageServer


__all__ = ["EditorSession", "language_server"]

_JOB = re.compile(r"^def (model|batch)\(", re.MULTILINE)
_HOT = 0.15
"""Share of the network's time from which a line's hint says so."""
OPTIONS = ("job", "machine", "memory", "batch", "inputs", "arguments")


class EditorSession:
    """Jobs that were looked at for one editor, and what is known of their files."""

    def __init__(self, server: LanguageServer) -> None:
        self.server = server
        self.options: dict[str, Any] = {}
        self.root = Path.cwd()
        self.files: dict[str, dict[str, Any]] = {}
        """Absolute path -> its facts, with the text they belong to and the job."""
        self.summaries: dict[str, dict[str, Any]] = {}
        self.published: dict[str, set[str]] = {}
        self.running: dict[str, asyncio.Task[None]] = {}

    def configure(self, given: Mapping[str, Any] | None, root: str | None) -> None:
        """Take over what the editor said at the beginning."""
        self.options = {name: value for name, value in (given or {}).items() if value is not None}
        self.root = Path(root) if root else self.root

    def job_of(self, path: Path) -> str | None:
        """The job that a file is, or belongs to."""
        if job := self.options.get("job"):
            return str(self.root / job) if str(job).endswith(".py") else str(job)
        if (known := self.files.get(str(path))) is not None:
            return str(known["job"])
        try:
            found = set(_JOB.findall(path.read_text(encoding="utf-8", errors="replace")))
        except OSError:
            return None
        return str(path) if found == {"model", "batch"} else None

    def look(self, path: Path) -> None:
        """Look at the job of a file, again if it was being looked at."""
        job = self.job_of(path)
        if job is None:
            return
        if (before := self.running.get(job)) is not None:
            before.cancel()
        self.running[job] = asyncio.get_running_loop().create_task(self._look(job))

    async def _look(self, job: str) -> None:
        from lsprotocol import types as lsp

        given = {name: self.options[name] for name in OPTIONS if name in self.options} | {"job": job}
        seconds = float(self.options.get("seconds", 120.0))
        found = await _facts(given, self.root, seconds)
        shown: dict[str, list[lsp.Diagnostic]] = {}
        if (trouble := found.get("trouble")) is not None:
            shown[trouble["file"]] = [
                _diagnostic(trouble["line"], f"outcore: {trouble['message']}", lsp.DiagnosticSeverity.Error)
            ]
        else:
            self.files = {p: f for p, f in self.files.items() if f["job"] != job}
            for path, facts in found["files"].items():
                text = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
                rows = {row["line"]: row for row in facts["lines"]}
                self.files[path] = {"job": job, "text": text, "rows": rows, "functions": facts["functions"]}
            summary = self.summaries[job] = found["summary"]
            if summary["over"]:
                place = (summary["file"], summary["line"]) if summary["file"] in found["files"] else (job, 1)
                shown[place[0]] = [_diagnostic(place[1], summary["message"], lsp.DiagnosticSeverity.Warning)]
        for path in self.published.get(job, set()) | set(shown):
            diagnostics = lsp.PublishDiagnosticsParams(uri=Path(path).as_uri(), diagnostics=shown.get(path, []))
            self.server.text_document_publish_diagnostics(diagnostics)
        self.published[job] = set(shown)
        await self._refresh()

    async def _refresh(self) -> None:
        """Have the editor ask again, where it can."""
        workspace = self.server.client_capabilities.workspace
        with contextlib.suppress(Exception):
            if workspace and workspace.inlay_hint and workspace.inlay_hint.refresh_support:
                await self.server.workspace_inlay_hint_refresh_async(None)
            if workspace and workspace.code_lens and workspace.code_lens.refresh_support:
                await self.server.workspace_code_lens_refresh_async(None)

    async def settled(self, uri: str) -> None:
        """Wait for a job that is being looked at, where the editor could not be told that its hints are there now."""
        workspace, path = self.server.client_capabilities.workspace, _path(uri)
        told = workspace and workspace.inlay_hint and workspace.inlay_hint.refresh_support
        task = self.running.get(self.job_of(path) or "") if path is not None else None
        if task is not None and not told and not task.done():
            await asyncio.wait({task})

    def rows(self, uri: str) -> dict[int, dict[str, Any]]:
        """The facts of a document's lines, those that were edited since left out."""
        path = _path(uri)
        known = self.files.get(str(path)) if path is not None else None
        if known is None:
            return {}
        now = self.server.workspace.get_text_document(uri).source.splitlines()
        text = known["text"]
        same = {
            number: row
            for number, row in known["rows"].items()
            if number <= len(now) and number <= len(text) and now[number - 1] == text[number - 1]
        }
        return {number: row | {"width": len(now[number - 1])} for number, row in same.items()}


async def _facts(given: dict[str, Any], folder: Path, seconds: float) -> dict[str, Any]:
    """Run a job in a process of its own."""
    module, job = "outcore.explore.editor_facts", given["job"]
    found, wrong = await answer_of(module, given, seconds=seconds, folder=str(folder))
    if isinstance(found, dict):
        return found
    late = f"{job} was not recorded within {seconds:g} s"
    said = late if wrong == "time" else f"the process of {job} ended with {wrong}"
    return {"trouble": {"file": str(Path(job).resolve()), "line": 1, "message": said}}


def language_server() -> LanguageServer:
    """A server that answers; `start_io` runs it."""
    from lsprotocol import types as lsp
    from pygls.lsp.server import LanguageServer

    from outcore import __version__

    server = LanguageServer("outcore", __version__)
    session = EditorSession(server)

    @server.feature(lsp.INITIALIZE)
    def initialize(params: lsp.InitializeParams) -> None:
        options = params.initialization_options
        root = _path(params.root_uri) if params.root_uri else None
        session.configure(options if isinstance(options, Mapping) else None, str(root) if root else None)

    @server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    async def opened(params: lsp.DidOpenTextDocumentParams) -> None:
        path = _path(params.text_document.uri)
        if path is not None and str(path) not in session.files:
            session.look(path)

    @server.feature(lsp.TEXT_DOCUMENT_DID_SAVE)
    async def saved(params: lsp.DidSaveTextDocumentParams) -> None:
        if (path := _path(params.text_document.uri)) is not None:
            session.look(path)

    @server.feature(lsp.TEXT_DOCUMENT_INLAY_HINT)
    async def hints(params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
        await session.settled(params.text_document.uri)
        first, last = params.range.start.line, params.range.end.line
        rows = session.rows(params.text_document.uri)
        return [
            lsp.InlayHint(
                position=lsp.Position(number - 1, row["width"]),
                label=f"{row['hint']}{' ◀' if row['share'] >= _HOT else ''}",
                padding_left=True,
                tooltip=lsp.MarkupContent(lsp.MarkupKind.Markdown, row["hover"]),
            )
            for number, row in rows.items()
            if first <= number - 1 <= last
        ]

    @server.feature(lsp.TEXT_DOCUMENT_HOVER)
    def hover(params: lsp.HoverParams) -> lsp.Hover | None:
        row = session.rows(params.text_document.uri).get(params.position.line + 1)
        if row is None:
            return None
        return lsp.Hover(contents=lsp.MarkupContent(lsp.MarkupKind.Markdown, row["hover"]))

    @server.feature(lsp.TEXT_DOCUMENT_CODE_LENS)
    def lenses(params: lsp.CodeLensParams) -> list[lsp.CodeLens]:
        path = _path(params.text_document.uri)
        known = session.files.get(str(path)) if path is not None else None
        if known is None or known["job"] not in session.summaries:
            return []
        title = session.summaries[known["job"]]["lens"]
        return [
            lsp.CodeLens(range=_line_range(number), command=lsp.Command(title=title, command=""))
            for number in known["functions"][:1]
        ]

    return server


def _diagnostic(line: int, message: str, severity: lsp.DiagnosticSeverity) -> lsp.Diagnostic:
    from lsprotocol import types as lsp

    return lsp.Diagnostic(range=_line_range(line, 500), message=message, severity=severity, source="outcore")


def _line_range(line: int, width: int = 0) -> lsp.Range:
    from lsprotocol import types as lsp

    at = max(0, line - 1)
    return lsp.Range(start=lsp.Position(at, 0), end=lsp.Position(at, width))


def _path(uri: str) -> Path | None:
    """The file of an address; none for what is not a file."""
    parts = urlsplit(uri)
    return Path(url2pathname(parts.path)).resolve() if parts.scheme == "file" else None
