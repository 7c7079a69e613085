"""Write the tables of README.md from the results."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
NORMS = "2026-11-15-h200-norms-three-launches.json"


def rows() -> list[str]:
    out = [
        "| model | size | precision | how | step ms | over plain | peak GiB | over plain | predicted peak |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted((HERE / "results").glob("*-h200-*.json")):
        if "first" in path.name or "norms" in path.name:
            continue
        found = json.loads(path.read_text())["rows"]
        plain = {(r["model"], r["side"], r["precision"]): r for r in found if r["how"] == "plain"}
        for r in found:
            base = plain[(r["model"], r["side"], r["precision"])]
            name = f"| {r['model']} | {r['batch']}x{r['side']} | {r['precision']} | {r['how']} |"
            if "error" in r:
                out.append(f"{name} {r['error'].partition(';')[0][:150]} | | | | |")
            elif "ms" in r:
                unlimited = r.get("budget", 1) is None
                how = r["how"] if not unlimited else "outcore, no budget"
                graphs = "graphs" in r["how"]
                peak = r["reserved"] if graphs else r["peak"]
                shown = f"{peak / 2**30:.2f}{' reserved' if graphs else ''}"
                predicted = f"{r['predicted_peak'] / 2**30:.2f}" if "predicted_peak" in r else ""
                out.append(
                    f"| {r['model']} | {r['batch']}x{r['side']} | {r['precision']} | {how} | {r['ms']:.1f} | "
                    f"{r['ms'] / base['ms']:.3f}x | {shown} | {'' if graphs else format(peak / base['peak'], '.3f')} | "
                    f"{predicted} |"
                )
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
    readme.write_text(replaced(replaced(readme.read_text(), "table", rows()), "norms", norms()))


if __name__ == "__main__":
    main()
