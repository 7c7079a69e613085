"""Write the table of README.md from the results."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end -->"


def rows() -> list[str]:
    """The newest day's."""
    out = [
        "| model | batch x length | how | step ms | over plain | GiB reserved | less | GiB allocated | less | equal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    paths = sorted((HERE / "results").glob("*.json"))
    for path in (p for p in paths if p.name[:10] == paths[-1].name[:10]):
        document = json.loads(path.read_text())
        timed = document.get("alone", True)  # with the device to itself
        plain = {r["model"]: r for r in document["rows"] if r["how"] == "plain"}
        for r in document["rows"]:
            name, base = f"| {r['model']} | {r['batch']}x{r['length']} | {r['how']} |", plain[r["model"]]
            if "error" in r:
                out.append(f"{name} {r['error'][:120]} | | | | | | |")
                continue
            times = f"{r['ms']:.1f} | {r['ms'] / base['ms']:.3f}x" if timed else "not timed |"
            reserved = f"{r['reserved'] / 2**30:.2f} | {base['reserved'] / r['reserved']:.2f}x"
            # What lies in the memory of CUDA graphs is not counted by the allocator's peak.
            allocated = (
                f"{r['peak'] / 2**30:.2f} | {base['peak'] / r['peak']:.2f}x" if "graphs" not in r["how"] else " | "
            )
            out.append(f"{name} {times} | {reserved} | {allocated} | {r.get('equal_gradients', '')} |")
    return out


def main() -> None:
    readme = HERE / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n\n" + "\n".join(rows()) + f"\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
