"""How far a twin on torch is from Keras in float64: outputs, loss, gradients, 20 steps of SGD and of Adam, `predict`.

    python benchmarks/keras-twins/measure.py --out results/DATE-cpu.jsonl [model ...]
    python benchmarks/keras-twins/measure.py --readme

Each model runs in a process of its own (`tests.keras.on_torch`), with Keras on its torch backend. A row is appended to
the file when its model is done; models that are in it with nothing to complain of are not run again; of several rows
the last counts. ``--readme`` writes the table of the README anew from the file that is named in front of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
from tests.keras.networks import APPLICATIONS, NETWORKS  # noqa: E402

WITHIN = 1e-10
COLUMNS = ("output", "loss", "gradient", "SGD x 20", "Adam x 20")


def row_of(model: str, seconds: float) -> dict[str, Any]:
    """The differences of a model, or what went wrong."""
    environment = {**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "tests.keras.on_torch", model]
    begun = time.monotonic()
    try:
        shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=seconds)
        if shown.returncode == 0:
            found = json.loads(shown.stdout.splitlines()[-1])
            return {**found, "seconds": round(time.monotonic() - begun)}
        failed = shown.stderr[-1500:]
    except subprocess.TimeoutExpired:
        failed = f"not done after {seconds:.0f} s"
    return {"name": model, "failed": failed}


def is_good(row: dict[str, Any]) -> bool:
    """Whether everything is within the tolerance, and the graph is Keras'."""
    return "failed" not in row and all(row[c] < WITHIN for c in COLUMNS) and not row["graph"]


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The last row of each model."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({row["name"]: row for row in found}.values())


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, and how many are within the tolerance."""
    lines = [f"| model | {' | '.join(COLUMNS)} | layers and edges that differ |", "| --- " * (len(COLUMNS) + 2) + "|"]
    done = [row for row in rows if "failed" not in row]
    for row in done:
        lines.append(f"| {row['name']} | {' | '.join(f'{row[c]:.1e}' for c in COLUMNS)} | {row['graph']} |")
    good = [row for row in rows if is_good(row)]
    worst = max((row[c] for row in done for c in COLUMNS), default=0.0)
    said = f"{len(good)} of {len(rows)} models within {WITHIN:.0e}; the largest difference is {worst:.1e}."
    failed = [f"- {row['name']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join([*lines, "", said, *(["", *failed] if failed else [])])


def write_readme() -> None:
    """The tables of the README, each between its two comments."""
    path = Path(__file__).with_name("README.md")

    def made(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n\n{table(rows_in(path.parent / 'results' / found[1]))}\n\n<!-- end -->"

    path.write_text(re.sub(r"<!-- (\S+\.jsonl) -->.*?<!-- end -->", made, path.read_text(), flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*NETWORKS, *APPLICATIONS])
    parser.add_argument("--out", type=Path, default=Path("results/rows.jsonl"))
    parser.add_argument("--readme", action="store_true", help="write the table of the README anew")
    parser.add_argument("--seconds", type=float, default=530, help="the most that one model may take")
    chosen = parser.parse_args()
    if chosen.readme:
        write_readme()
        return
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    known = {row["name"] for row in rows_in(chosen.out) if is_good(row)}
    for model in chosen.models:
        if model not in known:
            row = row_of(model, chosen.seconds)
            with chosen.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
