"""The commands that do what the page shows, ready to be copied into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outcore.explore.parts import ExploreSettings

__all__ = ["command_rows"]


def command_rows(settings: ExploreSettings, *, trains: bool) -> list[dict[str, Any]]:
    """Command lines with a word on each; ``{memory}``, ``{batch}`` and ``{image}`` are what the page has chosen.

    The commands that plan and train take a job's images as they are: they are left out where others are looked at.

    Args:
        settings: what the page was made with.
        trains: whether `outcore train` takes the job, which must be a file.
    """
    job = [settings.job, *_each("-i", settings.inputs), *_each("-a", settings.arguments)]
    on = ["--on", settings.machine] if settings.machine else []
    several = ["--devices", str(settings.devices)] if settings.devices and settings.devices > 1 else []
    image = ["--image", str(settings.image)] if settings.image is not None else []
    plan = ["plan", *job, "-b", "{batch}", *(["--machine", *on[1:]] if on else []), *several, "-m", "{memory}"]
    found = [
        ("plan", "make this plan and save it", plan),
        ("verify", "train under the plan and in plain PyTorch, and compare", ["verify", *job, "plan.json"]),
    ]
    if trains:
        found.append(("train", "train within this budget", ["train", *job, "--memory", "{memory}"]))
    if image:
        found = []
    found.append(
        ("profile", "the same figures in the terminal", ["profile", *job, "-b", "{batch}", *image, *on, "-d", "2"])
    )
    found.append(("explore", "this page for this size", ["explore", *job, "-b", "{batch}", "--image", "{image}", *on]))
    return [{"name": name, "what": what, "text": _line(words, name)} for name, what, words in found]


def _line(words: Sequence[str], name: str) -> str:
    quoted = " ".join(word if word.startswith("{") else shlex.quote(word) for word in words)
    return f"outcore {quoted}{' -o plan.json' if name == 'plan' else ''}"


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]
