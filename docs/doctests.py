"""Examples in docstrings are code: fence them for the reference pages of the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^[ ]*>>> .*(?:\n(?![ ]*$).*)*)", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Puts a fence around every paragraph that begins with a prompt."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that was just read."""
        if obj.docstring is not None and "```" not in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
