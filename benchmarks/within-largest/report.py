"""Write the table of README.md from the results.

Runs of a row add up: the largest size that trained, and every size that did not and is larger.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end -->"
Key = tuple[str, str, str, str, str]
"""Model, limit, allocator, what grows, how."""


def merged() -> dict[Key, dict[str, Any]]:
    found: dict[Key, dict[str, Any]] = {}
    for path in sorted((HERE / "results").glob("*.json")):
        document = json.loads(path.read_text())
        allocator = document["environment"].get("allocator", "default").partition(":")[0]
        for row in document["rows"]:
            how = row["how"] + (", reassociated" if row.get("exact") == "reassociated" else "")
            key = (row["model"], row["limit"], allocator, row["grows"], how)
            before = found.get(key, {"failed": []})
            best = max((before, row), key=lambda r: r.get("size", 0))
            failed = {f["size"]: f["error"] for r in (before, row) for f in r["failed"]}
            predicted = row.get("predicted", before.get("predicted"))
            found[key] = {**best, "predicted": predicted, "failed": [{"size": s, "error": failed[s]} for s in failed]}
    return found


def sized(grows: str, size: int) -> str:
    return f"{size:,} px" if grows == "image" else f"{size:,} images"


def line(key: Key, row: dict[str, Any], plain: dict[str, Any]) -> str:
    grows, size, predicted = key[3], row.get("size", 0), row["predicted"]
    above = sorted({f["size"] for f in row["failed"] if f["size"] > size})
    start = f"| {' | '.join(key)} | {sized(grows, predicted) if predicted else ''} "
    tried = ", ".join(f"{size:,}" for size in above)
    if not size:
        return f"{start}| none of those tried | | | | {tried} |"
    amount = (size / plain["size"]) ** (2 if grows == "image" else 1) if plain.get("size") else float("nan")
    share = f" ({size / predicted:.2f} of predicted)" if predicted else ""
    return (
        f"{start}| {sized(grows, size)}{share} | {amount:.2f}x {'pixels' if grows == 'image' else 'images'} "
        f"| {row['seconds']:.2f} | {row['peak'] / 2**30:.1f} | {tried} |"
    )


def main() -> None:
    found = merged()
    out = [
        "| model | limit | allocator | grows | how | predicted largest | largest that trained | over plain | step s "
        "| peak GiB | out of memory at |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(line(key, row, found.get((*key[:4], "plain"), {})) for key, row in sorted(found.items(), key=_order)),
    ]
    readme = HERE / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n\n" + "\n".join(out) + f"\n\n{END}{rest.partition(END)[2]}")


def _order(item: tuple[Key, dict[str, Any]]) -> tuple[Any, ...]:
    model, limit, allocator, grows, how = item[0]
    return model, limit, allocator != "default", grows != "image", how != "plain"


if __name__ == "__main__":
    main()
