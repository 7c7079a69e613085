"""Which rows a case has, in which order, and what each needs to be known before it can begin.

The most telling come first: tier "a" is plain training in both layouts, ours at half of its memory, torch.compile and
ours compiled; "b" the other budgets and the usual peers; "c" what completes the frontier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["TIERS", "Ready", "Way", "fastest_plain", "peak_of", "ways"]

Rows = dict[str, dict[str, Any]]
"""What is there of a case, by way."""
COMPILE = ("1.0", "0.7", "0.5", "0.3", "0.1")
PLAIN = ("plain first", "plain last")
MOST_PINNED = 40 * 2**30
"""Plain's peak, above which a host of 128 GiB cannot hold it all: torch rounds what it pins up to powers of two."""


@dataclass(frozen=True)
class Ready:
    """What a row begins with."""

    channels_last: bool
    budget: int | None = None


@dataclass(frozen=True)
class Way:
    """A row, and from which others its budget comes."""

    name: str
    tier: str
    needs: tuple[str, ...] = PLAIN
    budget: Callable[[Rows], int | None] = lambda rows: None

    @property
    def run(self) -> str:
        """What runs: layouts and budgets are not part of it."""
        if self.name in PLAIN:
            return "plain"
        return "ours compile" if self.name.startswith("ours compile") else self.name

    def ready(self, rows: Rows, layouts: bool) -> Ready | str | None:
        """What it begins with; why it cannot; none while others are missing."""
        if self.name in PLAIN:
            return Ready(self.name == "plain last") if layouts or self.name == "plain first" else "has no channels"
        if any(name not in rows for name in self.needs):
            return None
        plain = fastest_plain(rows)
        if plain is None:
            return "plain training was not measured"
        if self.name.startswith(("offload", "save_on_cpu")) and peak_of(plain) > MOST_PINNED:
            return "it would pin more memory than the host has"
        try:
            return Ready(plain["channels_last"], self.budget(rows))
        except LookupError as error:
            return str(error.args[0])


def peak_of(row: dict[str, Any]) -> int:
    """What a row reserved: of ours at any time, the first step included; of peers without their first steps, in which
    they search for algorithms."""
    names = ("reserved", "first_reserved", "warm_reserved") if row["way"].startswith("ours") else ("reserved",)
    return max(row[name] for name in names if name in row)


def fastest_plain(rows: Rows) -> dict[str, Any] | None:
    """Plain training in the layout in which it is faster."""
    there = [rows[name] for name in PLAIN if name in rows and "ms" in rows[name]]
    return min(there, key=lambda row: row["ms"]) if there else None


def _share(share: float) -> Callable[[Rows], int]:
    def budget(rows: Rows) -> int:
        plain = fastest_plain(rows)
        assert plain is not None
        return int(share * peak_of(plain))

    return budget


def _of_compile(share: float) -> Callable[[Rows], int]:
    """A share of the smallest peak that torch.compile has reached."""

    def budget(rows: Rows) -> int:
        peaks = [peak_of(rows[f"compile {how}"]) for how in COMPILE if "ms" in rows.get(f"compile {how}", {})]
        if not peaks:
            raise LookupError("torch.compile was not measured")
        return int(share * min(peaks))

    return budget


_LEAST = (*PLAIN, "compile 0.1")
_WAYS = (
    Way("plain first", "a", ()),
    Way("plain last", "a", ()),
    Way("ours 1/2", "a", budget=_share(1 / 2)),
    Way("compile 1.0", "a"),
    Way("compile 0.1", "a"),
    Way("ours compile 1/2", "a", budget=_share(1 / 2)),
    Way("checkpoint fine", "a"),
    Way("ours compile 1/2 of compile", "b", _LEAST, _of_compile(1 / 2)),
    Way("compile 0.5", "b"),
    Way("ours 1/3", "b", budget=_share(1 / 3)),
    Way("compile reduce-overhead", "b"),
    Way("plain graphs", "b"),
    Way("checkpoint coarse", "b"),
    Way("selective coarse", "b"),
    Way("offload 1.0", "b"),
    Way("ours compile 1/3", "b", budget=_share(1 / 3)),
    Way("ours least", "b", budget=_share(0.02)),
    Way("ours compile 1/3 of compile", "c", _LEAST, _of_compile(1 / 3)),
    Way("checkpoint fine graphs", "c"),
    Way("offload 0.5", "c"),
    Way("compile 0.7", "c"),
    Way("compile 0.3", "c"),
    Way("save_on_cpu", "c"),
)
TIERS = ("a", "b", "c")


def ways(tier: str) -> list[Way]:
    """The rows of a tier, the most telling first."""
    return [way for way in _WAYS if way.tier == tier]
