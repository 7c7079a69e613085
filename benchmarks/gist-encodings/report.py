"""Write the table of README.md from the results."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end -->"


def rows() -> list[str]:
    out = [
        "| model | batch | how | step ms | over plain | peak GiB | less memory | above weights | gradient off by | "
        "cosine | worst parameter |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted((HERE / "results").glob("*-h200*.json")):
        found = json.loads(path.read_text())["rows"]
        plain = {r["model"]: r for r in found if r["how"] == "plain"}
        for r in found:
            base, name = plain[r["model"]], f"| {r['model']} | {r['batch']}x{r['side']} | {r['how']} |"
            if "error" in r:
                out.append(f"{name} {r['error'][:120]} | | | | | | | |")
                continue
            above, of_plain = r["peak"] - r["held"], base["peak"] - base["held"]
            peak = above + base["held"]  # without the copy of the weights that the script held beside
            off = f"{r['off']:.2%} | {r['cosine']:.6f} | {r['worst_off']:.2%} |" if "off" in r else "0 | 1 | 0 |"
            out.append(
                f"{name} {r['ms']:.1f} | {r['ms'] / base['ms']:.3f}x | {peak / 2**30:.2f} | "
                f"{base['peak'] / peak:.2f}x | {of_plain / above:.2f}x | {off}"
            )
    return out


def sizes() -> list[str]:
    """What is stashed between forward and backward, over what plain training stashes."""
    kinds = ("lossless", "sparse", "half", "int8")
    out = ["", f"| model | stashed by plain, GiB | {' | '.join(kinds)} |", "|---|---|---|---|---|---|"]
    for path in sorted((HERE / "results").glob("*-sizes.json")):
        for r in json.loads(path.read_text())["rows"]:
            less = " | ".join(f"{r['plain'] / r[kind]:.2f}x" for kind in kinds)
            out.append(f"| {r['model']} {r['batch']}x{r['side']} | {r['plain'] / 2**30:.2f} | {less} |")
    return out


def main() -> None:
    readme = HERE / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n\n" + "\n".join([*rows(), *sizes()]) + f"\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
