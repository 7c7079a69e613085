"""Write the table of README.md from the results."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end -->"


def rows() -> list[str]:
    out = [
        "| model | limit | grows | how | largest | over plain | step s | peak GiB | tried above it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted((HERE / "results").glob("*.json")):
        found = json.loads(path.read_text())["rows"]
        plain = {(r["model"], r["limit"], r["grows"]): r for r in found if r["how"] == "plain"}
        for r in found:
            failed = "; ".join(f"{f['size']}: {f['error'][:70]}" for f in r["failed"])
            name = f"| {r['model']} | {r['limit']} | {r['grows']} | {r['how']} |"
            if "size" not in r:
                out.append(f"{name} none | | | | {failed} |")
                continue
            base = plain[r["model"], r["limit"], r["grows"]].get("size", 0)
            amount = r["size"] / base if base else float("nan")
            amount = amount**2 if r["grows"] == "image" else amount
            size = f"{r['size']} px" if r["grows"] == "image" else f"{r['size']} images"
            unit = "pixels" if r["grows"] == "image" else "images"
            out.append(
                f"{name} {size} | {amount:.2f}x {unit} | {r['seconds']:.2f} | {r['peak'] / 2**30:.2f} | {failed} |"
            )
    return out


def main() -> None:
    readme = HERE / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n\n" + "\n".join(rows()) + f"\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
