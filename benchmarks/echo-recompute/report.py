"""Write the tables of README.md from the results: of every model the newest run with the device to itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end -->"
GIB = 2**30
Rows = list[dict[str, Any]]


def runs() -> dict[str, tuple[Rows, bool]]:
    """Model -> its rows in the newest run that was timed, else in the newest; and whether it was.

    Files are named by their day and, within it, in the order in which they were made.
    """
    found: dict[str, tuple[Rows, bool]] = {}
    for path in sorted((HERE / "results").glob("2026-11-16-*.json")):
        document = json.loads(path.read_text())
        timed = document.get("alone", True)
        for name in dict.fromkeys(r["model"] for r in document.get("rows", ())):
            rows = [r for r in document["rows"] if r["model"] == name]
            if len(rows) > 1 and (timed or not found.get(name, (rows, False))[1]):
                found[name] = rows, timed
    return found


def measured() -> list[str]:
    out = [
        "| model | batch x length | how | step ms | over plain | over all kept as graphs | GiB reserved | less | "
        "less than all kept as graphs | GiB allocated | less | equal |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rows, timed in runs().values():
        plain = next(r for r in rows if r["how"] == "plain")
        kept = next((r for r in rows if r["how"] == "all kept, graphs" and "ms" in r), None)
        for r in rows:
            name = f"| {r['model']} | {r['batch']}x{r['length']} | {r['how']} |"
            if "error" in r:
                out.append(f"{name} {r['error'][:120]} | | | | | | | | |")
                continue
            graphs = "graphs" in r["how"]
            times = f"{r['ms']:.1f} | {r['ms'] / plain['ms']:.3f}x" if timed else "not timed |"
            over = f"{r['ms'] / kept['ms']:.3f}x" if kept and graphs and timed else ""
            less = f"{kept['reserved'] / r['reserved']:.2f}x" if kept and graphs else ""
            reserved = f"{r['reserved'] / GIB:.2f} | {plain['reserved'] / r['reserved']:.2f}x"
            # What lies in the memory of CUDA graphs is not counted by the allocator's peak.
            allocated = " | " if graphs else f"{r['peak'] / GIB:.2f} | {plain['peak'] / r['peak']:.2f}x"
            out.append(
                f"{name} {times} | {over} | {reserved} | {less} | {allocated} | {r.get('equal_gradients', '')} |"
            )
    return out


def scaling() -> list[str]:
    """Memory against length, without weights and gradients."""
    paths = sorted((HERE / "results").glob("*-scaling.json"))
    if not paths:
        return []
    out = [
        "",
        "| length T | held by plain, GiB | times the length before | held by ours | times | less | "
        "peak of plain | of ours | less | equal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    before: dict[str, Any] | None = None
    for r in json.loads(paths[-1].read_text())["scaling"]:
        a, b = r["plain"], r["ours"]
        grown = [f"{r[k]['held'] / before[k]['held']:.2f}x" if before else "" for k in ("plain", "ours")]
        out.append(
            f"| {r['length']} | {a['held'] / GIB:.2f} | {grown[0]} | {b['held'] / GIB:.2f} | {grown[1]} | "
            f"{a['held'] / b['held']:.2f}x | {a['peak'] / GIB:.2f} | {b['peak'] / GIB:.2f} | "
            f"{a['peak'] / b['peak']:.2f}x | {r['equal']} |"
        )
        before = r
    return out


def main() -> None:
    readme = HERE / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    table = "\n".join([*measured(), *scaling()])
    readme.write_text(f"{head}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
