"""A profile for the terminal: the figures that matter, then where time and memory go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from outcore.cost.costs import Totals
from outcore.cost.predicted.scaling import Scaling
from outcore.cost.profile import Profile
from outcore.machine import format_bytes, format_rate, format_time

__all__ = ["ProfileView", "scaling_table", "source_in_words"]

_BAR = "▏▎▍▌▋▊▉█"
_WIDTH = 12


class ProfileView:
    """A profile as something `rich` prints."""

    def __init__(self, profile: Profile, *, depth: int = 1, top: int = 8) -> None:
        self.profile, self.depth, self.top = profile, depth, top

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._summary()
        yield Text()
        # Names are never cut; what only repeats a number is left out where there is little room.
        yield self._blocks(with_source=options.max_width >= 110, with_bar=options.max_width >= 90)
        yield Text()
        yield self._kinds()
        yield Text()
        yield from self._warnings()

    def _summary(self) -> Table:
        p = self.profile
        grid = Table.grid(padding=(0, 2))
        share = p.memory.peak_bytes / p.device.memory_bytes
        measured = p.step.source == "measured"
        between = "from the fastest to the slowest runs" if measured else "in four cases of five"
        grid.add_row("job", f"{p.job}, batch {p.size}, on {p.device.name}")
        low, high = map(format_time, p.step.interval_s)
        grid.add_row(
            "step", f"{format_time(p.step.step_s)}, {source_in_words(p)} ({low} to {high} {between}): {_phases(p)}"
        )
        grid.add_row("throughput", f"{p.per_second:,.2f} samples/s, device busy {p.busy_share:.0%}")
        memory = f"{format_bytes(p.memory.peak_bytes)} of {format_bytes(p.device.memory_bytes)}"
        style = "" if p.fits else "bold red"
        part = f"{share:,.0%}" if share >= 0.01 else "below 1%"
        grid.add_row("peak memory", Text(f"{memory} ({part}){'' if p.fits else ': does not fit'}", style=style))
        grid.add_row("at the peak", _categories(p))
        rate = format_rate(p.flops / p.step.step_s, "FLOP/s")
        grid.add_row("matrix work", f"{format_rate(p.flops, 'FLOP')} per step, {rate}")
        for found in p.precisions:
            words = (
                f"{found.peak_share:.0%} of the device's rate over the step, {found.busy_peak_share:.0%} while at it"
            )
            grid.add_row(f"  in {found.name}", f"{format_rate(found.flops, 'FLOP')}, {words}")
        if p.device.kind == "cuda":
            grid.add_row("tensor cores", f"busy {p.matrix_unit_share:.0%} of the step if at full rate")
        return grid

    def _blocks(self, *, with_source: bool, with_bar: bool) -> Table:
        p = self.profile
        table = Table(box=None, pad_edge=False)
        for name in ("block", "type"):
            table.add_column(name, overflow="fold")
        names = ("forward", "backward", "share", *([""] if with_bar else []), "saved", "parameters")
        for name in names:
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        if with_source:
            table.add_column("source", style="dim")
        whole = p.costs.total().time_s or 1.0
        for path, total in p.costs.by_depth(self.depth).items():
            block = p.graph.blocks[path]
            share = total.time_s / whole
            table.add_row(
                path,
                block.type,
                format_time(total.forward_s),
                format_time(total.backward_s),
                f"{share:.0%}",
                *([Text(_bar(share), style="cyan")] if with_bar else []),
                format_bytes(total.saved_bytes),
                f"{block.parameters:,}" if block.parameters else "",
                *([block.source] if with_source else []),
            )
        return table

    def _kinds(self) -> Table:
        p = self.profile
        whole = p.costs.total().time_s or 1.0
        table = Table("kind", "calls", "forward", "backward", "share", "saved", box=None, pad_edge=False)
        for column in range(1, 6):
            table.columns[column].justify = "right"
        rows: list[tuple[str, Totals]] = sorted(p.costs.by_kind().items(), key=lambda row: -row[1].time_s)
        for kind, total in rows[: self.top]:
            table.add_row(
                kind,
                str(total.calls),
                format_time(total.forward_s),
                format_time(total.backward_s),
                f"{total.time_s / whole:.0%}",
                format_bytes(total.saved_bytes),
            )
        return table

    def _warnings(self) -> Iterator[Text]:
        p = self.profile
        reasons: dict[str, int] = {}
        for cost in p.costs.calls.values():
            if cost.reason:
                reasons[cost.reason] = reasons.get(cost.reason, 0) + 1
        for reason, count in reasons.items():
            yield Text(f"where times come from: {reason} for {count} of {len(p.costs.calls)} calls", style="yellow")
        if large := p.too_large():
            yield Text(f"larger than the device on their own: {', '.join(self._named(large))}", style="red")

    def _named(self, large: list[str]) -> Iterator[str]:
        """Calls by the block that is shown for them: every such block, and how many of its calls."""
        calls = self.profile.costs.calls
        found = Counter(calls[name].at_depth(self.depth) for name in large)
        for path, total in self.profile.costs.by_depth(self.depth).items():
            if count := found[path]:
                yield path if total.calls == 1 else f"{path} ({count} of {total.calls} calls)"


def source_in_words(profile: Profile) -> str:
    """Where the time of a step comes from, as tables and pictures say it."""
    source = profile.step.source
    return {"measured": "from measured blocks", "analytic": "estimated"}.get(source, str(source))


def scaling_table(scaling: Scaling) -> Table:
    """Sizes one under the other, each with its most reliable time; the largest that fits last."""
    measured = any(p.measured_s is not None for p in scaling.points)
    table = Table(scaling.along, "step", "from", "to", box=None, pad_edge=False)
    for name in ("samples/s", "peak memory"):
        table.add_column(name, justify="right")
    table.add_column("")
    for column in table.columns[:-1]:
        column.justify, column.no_wrap = "right", True
    knees = {"time": scaling.knees("step_s"), "memory": scaling.knees("peak_bytes")}
    largest = scaling.largest or 0
    for p in scaling.points:
        if largest < p.size < 1.25 * largest and p.peak_bytes > scaling.capacity_bytes:
            continue  # tried on the way to the largest
        notes = ["measured" if p.measured_s is not None else "scaled"] if measured else []
        notes += [f"knee of {what}" for what, sizes in knees.items() if p.size in sizes]
        notes += ["largest that fits"] if p.size == scaling.largest else []
        notes += ["does not fit"] if p.peak_bytes > scaling.capacity_bytes else []
        table.add_row(
            str(p.size),
            format_time(p.step_s),
            format_time(p.low_s),
            format_time(p.high_s),
            f"{p.per_second:,.2f}",
            format_bytes(p.peak_bytes),
            Text(", ".join(notes), style="red" if "does not fit" in notes else ""),
        )
    for size in scaling.failures:
        table.add_row(str(size), "", "", "", "", "", Text("the network fails, see below", style="yellow"))
    return table


def _phases(p: Profile) -> str:
    names = ("forward", "backward", "optimizer", "transfer", "wait")
    parts = [(name, getattr(p.step, f"{name}_s")) for name in names]
    return ", ".join(f"{name} {format_time(seconds)}" for name, seconds in parts if seconds)


def _categories(p: Profile) -> str:
    held = p.memory.at_peak
    named = {"state": "optimizer state", "feature_gradients": "gradients of feature maps"}
    parts = [(named.get(f.name, f.name.replace("_", " ")), getattr(held, f.name)) for f in fields(held)]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)


def _bar(share: float) -> str:
    eighths = round(share * _WIDTH * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_BAR[rest - 1] if rest else "")
