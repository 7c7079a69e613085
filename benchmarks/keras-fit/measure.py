"""Peaks of ``model.fit`` under a budget, on Keras' torch or TensorFlow backend: predicted, measured, and the budget.

    python benchmarks/keras-fit/measure.py --out results [--backend torch] [--jobs 8] [--seconds 400] [model ...]
    python benchmarks/keras-fit/measure.py --table results/rows.jsonl
    python benchmarks/keras-fit/measure.py --readme

The last writes the tables of the README anew, each from the dated file that is named in front of it. Each model runs in
a process of its own (`tests.keras.fitted_memory`, `tests.keras.measured_memory`), several at a time.
Rows are appended to ``rows.jsonl`` as they come, and ``table.md`` is made from them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = (
    "unet relaynet unet-3d lstm transformer stack stack-bn cosmoflow vision-transformer MobileNetV2 ResNet50 VGG16 "
    "DenseNet121"
)


PROGRAMS = {"torch": "tests.keras.fitted_memory", "tensorflow": "tests.keras.measured_memory"}


def rows_of(model: str, backend: str, until: float) -> list[dict[str, Any]]:
    """The rows of a model, and what went wrong in its process."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", PROGRAMS[backend], model]
    left = max(1.0, until - time.monotonic())
    try:
        shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=left)
        out, error, code = shown.stdout, shown.stderr, shown.returncode
    except subprocess.TimeoutExpired as late:
        out, error, code = (late.stdout or b"").decode(), "ended: no time left", 1
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    found += [{"model": model, "failed": error[-1500:]}] if code else []
    return [{"backend": backend, **row} for row in found]


COLUMNS = {"budget": "budget", "predicted": "predicted", "measured": "measured"}
MORE = {"living": "tensors alone", "reserved": "reserved"}
"""Columns of rows that have them."""


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table; what was refused or failed below it."""
    columns = COLUMNS | {kind: name for kind, name in MORE.items() if any(f"{kind}_bytes" in row for row in rows)}
    lines = [f"| model | budget | {' | '.join(f'{name} MiB' for name in columns.values())} | kept |"]
    lines.append("| --- " * (len(columns) + 3) + "|")
    said = []
    for row in rows:
        if "measured_bytes" not in row:
            lines_of = str(row.get("refused") or row.get("failed")).strip().splitlines()
            why = [line for line in lines_of if not line.startswith(("WARNING", "I0000"))]  # TensorFlow's notes
            said.append(f"- {row['model']} {row.get('budget', '')}: {' '.join(why) or 'ended from outside'}")
            continue
        sizes = [row.get(f"{kind}_bytes") for kind in columns]
        shown = [f"{size / 2**20:.3f}" if size else "" for size in sizes]
        lines.append(f"| {row['model']} | {row['budget'] or 'none'} | {' | '.join(shown)} | {_kept(row)} |")
    return "\n".join([*lines, "", summary(rows), "", *said, ""])


def _kept(row: dict[str, Any]) -> str:
    """Whether what was measured is within the budget."""
    budget, most = row.get("budget_bytes"), row.get("reserved_bytes", row["measured_bytes"])
    if not budget:
        return ""
    above = "" if most <= budget else f"no, {most / budget - 1:.1%} above"
    if above and row.get("living_bytes", budget + 1) <= budget:
        return f"tensors alone; {most / budget - 1:.1%} above with chunks"
    return above or "yes"


def summary(rows: list[dict[str, Any]]) -> str:
    """How many budgets were accepted, kept and refused."""
    under = [row for row in rows if row.get("budget_bytes") and "measured_bytes" in row]
    kept = sum(1 for row in under if _kept(row) == "yes")
    alone = [row for row in under if "living_bytes" in row]
    refused = sum(1 for row in rows if "refused" in row)
    text = f"{len(under)} budgets were accepted, {kept} kept; {refused} refused."
    if alone:
        living = sum(1 for row in alone if row["living_bytes"] <= row["budget_bytes"])
        text += f" By the bytes of tensors alone, {living} of {len(alone)} were kept."
    return text


def write_readme() -> None:
    """Every table of the README from its file: what stands between its two comments."""
    path = Path(__file__).with_name("README.md")

    def made(found: re.Match[str]) -> str:
        lines = (path.parent / "results" / found[1]).read_text().splitlines()
        return f"<!-- {found[1]} -->\n\n{table([json.loads(line) for line in lines]).strip()}\n\n<!-- end -->"

    path.write_text(re.sub(r"<!-- (\S+\.jsonl) -->.*?<!-- end -->", made, path.read_text(), flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS.split())
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--backend", choices=PROGRAMS, default="torch")
    parser.add_argument("--table", type=Path, help="print the table of rows that are there, and measure nothing")
    parser.add_argument("--readme", action="store_true", help="write the tables of the README anew")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600)
    chosen = parser.parse_args()
    if chosen.readme:
        write_readme()
        return
    if chosen.table is not None:
        print(table([json.loads(line) for line in chosen.table.read_text().splitlines()]))
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + chosen.seconds
    every: list[dict[str, Any]] = []
    with ThreadPoolExecutor(chosen.jobs) as pool, (chosen.out / "rows.jsonl").open("a") as file:
        for found in pool.map(lambda model: rows_of(model, chosen.backend, until), chosen.models):
            every += found
            file.write("".join(json.dumps(row) + "\n" for row in found))
            file.flush()
            (chosen.out / "table.md").write_text(table(every))
    print(table(every))


if __name__ == "__main__":
    main()
