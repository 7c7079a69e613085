"""Real editors with the configurations of the documentation: Neovim is asked what it shows, Helix's screen is read.

Both are skipped where they are not installed; ``OUTCORE_NVIM`` and ``OUTCORE_HELIX`` name another program.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

pytest.importorskip("pygls")

from tests.explore.jobs import SMALL, line_of, write

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "editor.md"
NVIM = os.environ.get("OUTCORE_NVIM") or shutil.which("nvim")
HELIX = os.environ.get("OUTCORE_HELIX") or shutil.which("hx")
PATIENCE_S = 240

PROBE = """
local function eventually(what, seconds)
  return vim.wait(seconds * 1000, what, 100)
end
local found = {}
eventually(function() return #vim.lsp.inlay_hint.get({ bufnr = 0 }) > 0 end, 120)
found.hints = {}
for _, hint in ipairs(vim.lsp.inlay_hint.get({ bufnr = 0 })) do
  found.hints[tostring(hint.inlay_hint.position.line + 1)] = hint.inlay_hint.label
end
local line = vim.fn.search("a = self.first(image)")
local place = { textDocument = { uri = vim.uri_from_bufnr(0) }, position = { line = line - 1, character = 10 } }
for _, answer in pairs(vim.lsp.buf_request_sync(0, "textDocument/hover", place, 20000) or {}) do
  found.hover = answer.result and answer.result.contents.value
end
local whole = { textDocument = { uri = vim.uri_from_bufnr(0) } }
for _, answer in pairs(vim.lsp.buf_request_sync(0, "textDocument/codeLens", whole, 20000) or {}) do
  found.lens = answer.result and answer.result[1] and answer.result[1].command.title
end
local function said()
  local function row(d) return { line = d.lnum + 1, message = d.message, severity = d.severity } end
  return vim.tbl_map(row, vim.diagnostic.get(0))
end
found.before = said()
vim.cmd([[%s/self.second(a)/self.missing(a)/]])
vim.cmd("write")
eventually(function() return #vim.diagnostic.get(0, { severity = vim.diagnostic.severity.ERROR }) > 0 end, 120)
found.after = said()
vim.fn.writefile({ vim.json.encode(found) }, vim.env.OUTCORE_FOUND)
vim.cmd("qall!")
"""


def configuration(language: str) -> str:
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
    return str(blocks[language]).replace('"a100"', '"v100"').replace('"16GiB"', '"5MiB"')


def surroundings(folder: Path) -> dict[str, str]:
    """An environment in which `outcore` is this one."""
    (programs := folder / "bin").mkdir()
    command = programs / "outcore"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m outcore "$@"\n')
    command.chmod(0o755)
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(folder / "config")}
    return {**os.environ, **own, "XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.mark.skipif(NVIM is None, reason="no Neovim here")
def test_neovim_shows_hints_a_hover_a_lens_and_diagnostics(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "init.lua").write_text(configuration("lua"))
    (tmp_path / "probe.lua").write_text(PROBE)
    environment = surroundings(tmp_path) | {"OUTCORE_FOUND": str(tmp_path / "found.json")}
    command = [str(NVIM), "--headless", "-u", str(tmp_path / "init.lua"), str(path), "-c", "luafile probe.lua"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=2 * PATIENCE_S, capture_output=True, text=True
    )
    assert (tmp_path / "found.json").is_file(), done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    first = str(line_of(SMALL, "a = self.first(image)"))
    assert " · " in found["hints"][first] and "MiB" in found["hints"][first]
    assert "saved for backward" in found["hover"] and "4×32×64×64" in found["hover"]
    assert "samples/s" in found["lens"]
    assert ["more than 5.0 MiB" in row["message"] for row in found["before"]] == [True]
    [error] = [row for row in found["after"] if row["severity"] == 1]
    assert "missing" in error["message"] and error["line"] == line_of(SMALL, "self.second(a)")


@pytest.mark.skipif(HELIX is None, reason="no Helix here")
def test_helix_shows_hints_and_a_diagnostic(tmp_path: Path) -> None:
    path = write(tmp_path)
    (folder := tmp_path / "config" / "helix").mkdir(parents=True)
    (folder / "languages.toml").write_text(configuration("toml").replace('"pylsp", ', ""))
    assert "display-inlay-hints = true" in DOCUMENT.read_text()
    (folder / "config.toml").write_text("[editor.lsp]\ndisplay-inlay-hints = true\n")
    seen = screen_of([str(HELIX), str(path)], tmp_path, surroundings(tmp_path), ("more than 5.0 MiB", "· "))
    assert re.search(r"\d+(\.\d+)? (ms|µs) · \d+(\.\d+)? MiB", seen), seen[-3000:]
    assert "more than 5.0 MiB" in seen


def screen_of(command: list[str], folder: Path, environment: dict[str, str], wanted: tuple[str, ...]) -> str:
    """What a program writes to a terminal until it has written some words, as text alone."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, environment | {"TERM": "xterm-256color", "COLORTERM": "truecolor"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 220, 0, 0))
    text, end = "", time.monotonic() + PATIENCE_S
    at = line_of(SMALL, "a = self.first(image)")
    moves = itertools.cycle([f"{at}G".encode(), b"k", b"j"])  # Helix asks for hints after a key was pressed
    moved = time.monotonic()
    try:
        while time.monotonic() < end and not all(words in text for words in wanted):
            if select.select([terminal], [], [], 0.5)[0]:
                try:
                    text += plain(os.read(terminal, 1 << 16))
                except OSError:
                    break
            if time.monotonic() - moved > 2:
                os.write(terminal, next(moves))
                moved = time.monotonic()
    finally:
        os.write(terminal, b"\x1b:quit-all!\r")
        time.sleep(0.5)
        os.close(terminal)
        os.kill(process, 9)
        os.waitpid(process, 0)
    return text


def plain(written: bytes) -> str:
    """Without what moves the cursor and sets colours."""
    return re.sub(r"\x1b(\[[0-9;?<>=:]*[a-zA-Z]|\][^\x07]*\x07|[()][AB0]|[=>])", "", written.decode(errors="replace"))
