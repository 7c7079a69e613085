"""`outcore lsp`: a language server for editors."""

from __future__ import annotations

import importlib.util

from outcore.errors import OutcoreError

__all__ = ["lsp"]


def lsp() -> None:
    """Show what lines take in any editor: a language server on standard input and output.

    Editors start it themselves; docs/how-to/editor.md has settings for VS Code, Neovim and Helix.
    """
    if importlib.util.find_spec("pygls") is None:
        raise OutcoreError("the language server needs pygls, which is not installed; type: pip install 'outcore[ui]'")
    from outcore.explore.language_server import language_server

    language_server().start_io()
