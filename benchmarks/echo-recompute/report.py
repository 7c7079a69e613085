"""Write the table of README.md from the results."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end -->"


def rows() -> list[str]:
    out = [
        "| model | batch x length | how | step ms | over plain | peak GiB | less memory | predicted | equal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted((HERE / "results").glob("*.json")):
        found = json.loads(path.read_text())["rows"]
        plain = {r["model"]: r for r in found if r["how"] == "plain"}
        for r in found:
            name = f"| {r['model']} | {r['batch']}x{r['length']} | {r['how']} |"
            base = plain[r["model"]]
            if "error" in r:
                out.append(f"{name} {r['error'][:120]} | | | | | |")
                continue
            reserved = "graphs" in r["how"]  # the memory of CUDA graphs is not counted by the allocator's peak
            peak, plain_peak = (r["reserved"], base["reserved"]) if reserved else (r["peak"], base["peak"])
            note = " reserved" if reserved else ""
            out.append(
                f"{name} {r['ms']:.1f} | {r['ms'] / base['ms']:.3f}x | {peak / 2**30:.2f}{note} | "
                f"{plain_peak / peak:.2f}x | {r['predicted_peak'] / 2**30:.2f} | {r.get('equal_gradients', '')} |"
            )
    return out


def main() -> None:
    readme = HERE / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n\n" + "\n".join(rows()) + f"\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
