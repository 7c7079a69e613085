"""From rows that were stored to the figures of a claim: every row counts, the worst is named.

A function takes the documents of a claim, in the order in which they are listed, and returns what its sentence needs.
The same function is given the rows of a rerun.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "by_default",
    "captured",
    "compiled",
    "convolutions",
    "frontier",
    "fused",
    "largest",
    "partitions",
    "pipelines",
    "predictions",
    "scanned",
    "slide",
]

Document = Any
Figures = dict[str, Any]


def by_default(documents: Sequence[Document]) -> Figures:
    """The public call at half: of every network the row of the newest run that has it."""
    rows = {row["network"]: row for document in documents for row in document["rows"]}
    done = {name: row for name, row in rows.items() if "ratio" in row}
    ratios = sorted((row["ratio"], name) for name, row in done.items())
    held = [r for r in done.values() if r["reserved"] <= r["budget"] and not r["retries"] and not r["refused"]]
    slow = [f"{name.split()[0]} {ratio:.2f}x" for ratio, name in reversed(ratios) if ratio > 1.3]
    return {
        "networks": len(rows),
        "median": statistics.median(ratio for ratio, _ in ratios),
        "fastest": ratios[0][0],
        "slowest": ratios[-1][0],
        "slow": ", ".join(slow) or "none above 1.3x",
        "failed": ", ".join(name.split()[0] for name in rows if name not in done) or "none",
        "held": len(held),
        "bitwise": sum(row["bitwise"] == row["gradients"] for row in done.values()),
        "done": len(done),
    }


def frontier(documents: Sequence[Document]) -> Figures:
    """Ours by the public call against every peer that takes no more memory than it does."""
    cases: dict[str, dict[str, Any]] = {}
    for row in rows_of(documents):
        if "case" in row:
            cases.setdefault(row["case"], {})[row["way"]] = row
    ratios: dict[str, list[float]] = {"ours 1/2": [], "ours 1/3": [], "ours compile 1/2": []}
    within, counted, ahead, compared = 0, 0, 0, 0
    for rows in cases.values():
        plain = [rows[name] for name in ("plain first", "plain last") if "ms" in rows.get(name, {})]
        if not plain:
            continue
        base = min(row["ms"] for row in plain)
        for way, row in rows.items():
            if not way.startswith("ours"):
                continue
            counted += 1
            within += "ms" in row and _peak(row) <= row["budget"]
            if way in ratios and "ms" in row:
                ratios[way].append(row["ms"] / base)
        ours = [row for way, row in rows.items() if way.startswith("ours") and "ms" in row]
        for way, row in rows.items():
            if way.startswith("compile") and "ms" in row:
                compared += 1
                ahead += any(r["ms"] <= 1.02 * row["ms"] and _peak(r) <= 1.02 * _peak(row) for r in ours)
    found: Figures = {"cases": len(cases), "rows": counted, "within": within, "ahead": ahead, "compared": compared}
    for way, name in (("ours 1/2", "half"), ("ours 1/3", "third"), ("ours compile 1/2", "compiled")):
        values = ratios[way] or [math.nan]
        found |= {name: statistics.median(values), f"{name}_best": min(values), f"{name}_worst": max(values)}
        found[f"{name}_cases"] = len(ratios[way])
    return found


def compiled(documents: Sequence[Document]) -> Figures:
    """ResNet-50 on one image: ours at its smallest budget beside the smallest peak of torch.compile."""
    rows = [row for row in rows_of(documents) if row.get("case") == "resnet50" and "ms" in row]
    ours = min((row for row in rows if row["way"] == "ours"), key=lambda row: row["peak_bytes"])
    peer = min((row for row in rows if row["way"] == "compile"), key=lambda row: row["peak_bytes"])
    gib = 2**30
    return {
        "ours_gib": ours["peak_bytes"] / gib,
        "ours_ms": ours["ms"],
        "peer_gib": peer["peak_bytes"] / gib,
        "peer_ms": peer["ms"],
        "networks": len({row["case"] for row in rows_of(documents) if row["way"] == "compile"}),
    }


def largest(documents: Sequence[Document]) -> Figures:
    """The largest batch and image in 11 GiB, of plain training the largest of any run and allocator."""
    found: Figures = {}
    for grows in ("batch", "image"):
        for how in ("plain", "outcore"):
            sizes = [
                row["size"]
                for row in rows_of(documents)
                if row["limit"] == "11GiB" and row["grows"] == grows and row["how"] == how and "size" in row
            ]
            found[f"{grows}_{how}"] = max(sizes, default=math.nan)
    return found


def predictions(documents: Sequence[Document]) -> Figures:
    """Errors over all cases of all runs: those in which a shared host sets the pace, and older runs, among them."""
    every = [row for row in rows_of(documents) if "error" not in row]
    rows = [row for row in every if "predicted_s" in row]
    errors = {
        "before": [abs(row["said_bytes"] / row["measured_bytes"] - 1) for row in every if "said_bytes" in row],
        "peak": [abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in rows if "predicted_bytes" in row],
        "measured": [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows],
        "estimate": [abs(row["estimated_s"] / row["measured_s"] - 1) for row in rows if row.get("estimated_s")],
    }
    found: Figures = {"cases": len(rows), "estimates": len(errors["estimate"]), "befores": len(errors["before"])}
    for name, values in errors.items():
        values = values or [math.nan]
        found |= {name: statistics.median(values), f"{name}_worst": max(values)}
    return found


def convolutions(documents: Sequence[Document]) -> Figures:
    """Convolutions that the calibration has not seen: medians by group, the worst of all."""
    groups = [
        group["calibration"]
        for document in documents
        for precision in document["precisions"].values()
        for group in precision["compared"].values()
    ]
    return {
        "count": sum(group["count"] for group in groups),
        "lowest": min(group["median"] for group in groups),
        "highest": max(group["median"] for group in groups),
        "worst": max(group["worst"] for group in groups),
    }


def captured(documents: Sequence[Document]) -> Figures:
    """Models whose recording runs as they do; `replay` says what differs."""
    rows = rows_of(documents)
    return {
        "models": len(rows),
        "equal": sum(row.get("replay") == "" for row in rows),
        "seconds": statistics.median(row["seconds"] for row in rows if row.get("seconds") is not None),
    }


def slide(documents: Sequence[Document]) -> Figures:
    """The step on the largest slide, and steps that plain training can take too."""
    rows = rows_of(documents)
    found: Figures = {}
    slides = [row for row in rows if row["side"] == 100000 and "time_s" in row]
    if slides:
        found |= {"seconds": slides[-1]["time_s"], "gib": slides[-1]["reserved_bytes"] / 2**30}
    plain = {row["side"]: row["time_s"] for row in rows if row["how"] == "plain" and "time_s" in row}
    pairs = [row["time_s"] / plain[8192] for row in rows if row["how"] == "streamed" and row["side"] == 8192]
    return found | {"fastest": min(pairs), "slowest": max(pairs), "rows": len(pairs)}


def pipelines(documents: Sequence[Document]) -> Figures:
    """Steps of every schedule over the closed form."""
    over = [row["step_s"] / row["closed_form_s"] - 1 for document in documents for row in document["table"].values()]
    return {"lowest": min(over), "highest": max(over), "schedules": len(over)}


def partitions(documents: Sequence[Document]) -> Figures:
    """Slowest stage by measured time, of plans that balance time, and largest peak of those that balance memory."""
    rows = rows_of(documents)
    time = [_over(row, "slowest_s") for row in rows if row["balance"] == "compute"]
    memory = [_over(row, "peak_bytes") for row in rows if row["balance"] == "memory"]
    return {
        "cases": len(rows),
        "time_best": min(time),
        "time_worst": max(time),
        "memory_best": min(memory),
        "memory_worst": max(memory),
    }


def fused(documents: Sequence[Document]) -> Figures:
    """Sixteen models as one over sixteen steps of one, all of the same run."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows_of(documents):
        if "step_s" not in row or (row.get("refused") and row["what"] != "graphed serial"):
            continue
        times = found.setdefault((row["workload"], row["precision"]), {})
        if row["members"] == 1 and row["what"] in ("eager serial", "graphed serial"):
            times[row["what"]] = 16 * row["step_s"]
        elif row["members"] == 16 and row["what"] in ("fused", "fused, layers measured", "streams"):
            times["array"] = min(times.get("array", math.inf), row["step_s"])
    whole = [t for t in found.values() if len(t) == 3]
    plain, graphed = ([t[name] / t["array"] for t in whole] for name in ("eager serial", "graphed serial"))
    return {
        "workloads": len(whole),
        "plain_best": max(plain),
        "plain_worst": min(plain),
        "graphed_best": max(graphed),
        "graphed_worst": min(graphed),
        "graphed_mean": statistics.geometric_mean(graphed),
    }


def scanned(documents: Sequence[Document]) -> Figures:
    """An RNN of 20 hidden units over 30,000 steps in CUDA graphs; and what 256 hidden units give."""
    graphs = [row for document in documents for row in document.get("graphs", ()) if "cudnn_both_ms" in row]
    rnn = [r for r in graphs if r["setting"]["cell"] == "RNN" and not r["setting"]["every_step"]]
    found: Figures = {}
    if rnn:
        found |= {"backward": rnn[-1]["cudnn_backward_ms"] / rnn[-1]["scan_backward_ms"]}
        found |= {"step": rnn[-1]["cudnn_both_ms"] / rnn[-1]["scan_both_ms"]}
    wide = [
        row
        for document in documents
        for row in document.get("rows", ())
        if "failed" not in row and row["setting"]["hidden"] == 256 and row["setting"]["cell"] == "RNN"
    ]
    if wide:
        found["wide"] = wide[-1]["cudnn_backward_ms"] / wide[-1]["scan_backward_ms"]
        found["wide_automatic"] = wide[-1]["cudnn_step_ms"] / wide[-1]["automatic_step_ms"]
    return found


def rows_of(documents: Iterable[Document]) -> list[Any]:
    """All rows of all documents."""
    return [row for document in documents for row in (document["rows"] if isinstance(document, dict) else document)]


def _over(row: Any, name: str) -> float:
    return float(row["ours"][name] / row["torchgpipe"][name])


def _peak(row: Any) -> int:
    """Of ours the first steps included, of peers not: in these they search for algorithms."""
    names = ("reserved", "first_reserved", "warm_reserved") if row["way"].startswith("ours") else ("reserved",)
    return max(row[name] for name in names if name in row)
