"""Write the table of README.md from the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end -->"


def sized(row: dict[str, Any], size: int) -> str:
    return f"{size} px" if row["grows"] == "image" else f"{size} images"


def line(row: dict[str, Any], base: int, allocator: str) -> str:
    failed = ", ".join(f"{f['size']} ({f['error'][:60]})" for f in row["failed"]) or "nothing"
    start = f"| {row['model']} | {row['limit']} | {allocator} | {row['grows']} | {row['how']} "
    predicted = sized(row, row["predicted"]) if "predicted" in row else ""
    if "size" not in row:
        return f"{start}| {predicted} | none of those tried | | | | {failed} |"
    share = row["size"] / row["predicted"] if "predicted" in row else None
    amount = row["size"] / base if base else float("nan")
    amount = amount**2 if row["grows"] == "image" else amount
    unit = "pixels" if row["grows"] == "image" else "images"
    return (
        f"{start}| {predicted} | {sized(row, row['size'])}{f' ({share:.2f})' if share else ''} "
        f"| {amount:.2f}x {unit} | {row['seconds']:.2f} | {row['peak'] / 2**30:.1f} | {failed} |"
    )


def rows() -> list[str]:
    out = [
        "| model | limit | allocator | grows | how | predicted largest | trained (of predicted) | over plain | step s "
        "| peak GiB | tried, did not train |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted((HERE / "results").glob("*.json")):
        document = json.loads(path.read_text())
        found = document["rows"]
        plain = {(r["model"], r["limit"], r["grows"]): r for r in found if r["how"] == "plain"}
        for row in found:
            base = plain.get((row["model"], row["limit"], row["grows"]), {}).get("size", 0)
            out.append(line(row, base, document["environment"].get("allocator", "default")))
    return out


def main() -> None:
    readme = HERE / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n\n" + "\n".join(rows()) + f"\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
