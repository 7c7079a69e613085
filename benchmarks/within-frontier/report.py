"""Write the tables of README.md from the results.

Every cell is a ratio within one run: to the plain rows of the same file. Where several files have a cell, the newest
counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from networks import NAMES

HERE = Path(__file__).parent
NORMS = "2026-11-15-h200-norms-three-launches.json"
WAYS = {
    "outcore 0.5": "0.50",
    "outcore 0.33": "0.33",
    "outcore least": "least",
    "outcore 0.5 reassociated": "0.50, reassociated",
    "outcore 0.33 reassociated": "0.33, reassociated",
    "checkpoint per block": "checkpoint per block",
    "save_on_cpu": "save_on_cpu",
    "compile budget 0.5": "compile, budget 0.5",
}
GRAPHS = {
    f"{way} graphs{rest}": shown
    for way, rest, shown in (
        ("outcore 0.5", "", "0.50"),
        ("outcore 0.33", "", "0.33"),
        ("outcore least", "", "least"),
        ("outcore 0.5", " reassociated", "0.50, reassociated"),
        ("outcore 0.33", " reassociated", "0.33, reassociated"),
    )
}
Key = tuple[str, str, str]


def results() -> tuple[dict[Key, dict[str, tuple[dict[str, Any], dict[str, Any]]]], int]:
    """Case -> way -> its row and the plain row of the same file; the newest file counts."""
    found: dict[Key, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {}
    files = [
        p for p in sorted((HERE / "results").glob("*-h200-*.json")) if "norms" not in p.name and "first" not in p.name
    ]
    for path in files:
        rows = [r for r in json.loads(path.read_text())["rows"] if "model" in r]
        plain = {case_of(r): r for r in rows if r["how"] == "plain" and "ms" in r}
        for row in rows:
            base = plain.get(case_of(row))
            if base is not None and ("ms" in row or "error" in row) and row.get("predicted_slowdown") != 1.0:
                found.setdefault(case_of(row), {})[row["how"]] = (row, base)
    return found, len(files)


def plain_ms(rows: list[dict[str, Any]]) -> dict[tuple[str, int, int, str], float]:
    """Case -> milliseconds of its plain step."""
    plain = [r for r in rows if r.get("how") == "plain" and "ms" in r]
    return {(r["model"], r["batch"], r["side"], r["precision"]): r["ms"] for r in plain}


def case_of(row: dict[str, Any]) -> Key:
    size = "32x224" if row["batch"] == 32 else f"{row['batch']}x{row['side']}"
    return row["model"], size, row["precision"].split()[0]


def cell(pair: tuple[dict[str, Any], dict[str, Any]] | None) -> str:
    """Time and memory over plain's; graphs by what stays reserved."""
    if pair is None:
        return ""
    row, base = pair
    if "error" in row:
        return "no plan" if "plan" in row["error"].lower() else ""  # or the script failed: see the file
    peak = row["reserved"] if "graphs" in row["how"] else row["peak"]
    over = "!" if "budget" in row and row["budget"] and peak > row["budget"] else ""
    return f"{row['ms'] / base['ms']:.2f}x at {peak / base['peak']:.2f}{over}"


def table(size: str) -> list[str]:
    """One line per network and precision."""
    ways = WAYS if size == "1x4096" else GRAPHS | {w: s for w, s in WAYS.items() if not w.startswith("outcore")}
    found, _ = results()
    shown = list(ways.values())
    out = ["| network | precision | plain | " + " | ".join(shown) + " |", "|---" * (len(shown) + 3) + "|"]
    for name in NAMES:
        for precision in ("tf32", "bf16"):
            rows = found.get((name, size, precision), {})
            if not rows:
                out.append(f"| {name} | {precision} | not run |" + " |" * len(shown))
                continue
            plain = rows["plain"][0]
            cells = " | ".join(cell(rows.get(way)) for way in ways)
            out.append(f"| {name} | {precision} | {plain['ms']:.1f} ms, {plain['peak'] / 2**30:.2f} GiB | {cells} |")
    return out


def missing() -> dict[str, list[str]]:
    """Way -> cases that have no row of it."""
    found, _ = results()
    out: dict[str, list[str]] = {}
    for size in ("32x224", "1x4096"):
        ways = [w for w in (GRAPHS if size == "32x224" else WAYS) if "least" not in w]
        ways += ["checkpoint per block", "save_on_cpu", "compile budget 0.5"] if size == "32x224" else []
        for name in NAMES:
            for precision in ("tf32", "bf16"):
                for way in ways:
                    if "reassociated" in way and name in ("vgg19", "convnext_tiny"):
                        continue
                    if way not in found.get((name, size, precision), {}):
                        out.setdefault(way, []).append(f"{name}-{size}-{precision}")
    return out


def norms() -> list[str]:
    out = [
        "| precision | exact | share asked | step ms | over plain | host ms | peak of plain | predicted peak |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    found = json.loads((HERE / "results" / NORMS).read_text())["rows"]
    plain = {r["precision"]: r for r in found if r["how"] == "plain"}
    for r in found:
        base = plain[r["precision"]]
        share = r["peak_bytes"] / base["peak_bytes"]
        predicted = f"{r['predicted_peak_bytes'] / base['peak_bytes']:.3f}" if "predicted_peak_bytes" in r else ""
        out.append(
            f"| {r['precision']} | {r['how']} | {r.get('share') or '–'} | {r['ms']:.1f} | "
            f"{r['ms'] / base['ms']:.3f}x | {r['host_ms']:.1f} | {share:.3f} | {predicted} |"
        )
    return out


def replaced(text: str, mark: str, lines: list[str]) -> str:
    """The text with these lines between the mark and its end."""
    begin, end = f"<!-- {mark} -->", "<!-- end -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{tail}"


def main() -> None:
    readme = HERE / "README.md"
    text = readme.read_text()
    for mark, lines in (("large", table("1x4096")), ("small", table("32x224")), ("norms", norms())):
        text = replaced(text, mark, lines) if f"<!-- {mark} -->" in text else text
    readme.write_text(text)
    for way, cases in missing().items():
        print(f"{way}: {len(cases)} missing: {' '.join(cases)}")


if __name__ == "__main__":
    main()
