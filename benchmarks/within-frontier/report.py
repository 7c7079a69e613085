"""Write the table of README.md from the results."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end -->"


def rows() -> list[str]:
    out = [
        "| model | size | precision | how | step ms | over plain | peak GiB | over plain | predicted peak |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted((HERE / "results").glob("*-h200-*.json")):
        if "first" in path.name:
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


def main() -> None:
    readme = HERE / "README.md"
    text = readme.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    readme.write_text(f"{head}{BEGIN}\n\n" + "\n".join(rows()) + f"\n\n{END}{tail}")


if __name__ == "__main__":
    main()
