"""Write the tables of the README from the files in results/.

    python benchmarks/offload-parameters/report.py

Every ratio is within one run (its own baseline and link). Where two runs have the same row, the later file's is shown;
a row that is not of the same run as its model's baseline is marked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run import MODELS, SEEDS_S
from ways import WAYS

HERE = Path(__file__).parent
MARK = "<!-- tables -->"
AIM = 1.10


def rows() -> dict[tuple[str, str], dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted((HERE / "results").glob("*h200*.json")):
        for name, model in json.loads(path.read_text()).get("models", {}).items():
            for way, row in model["ways"].items():
                if "step_s" in row:
                    baseline = model["ways"]["baseline"]["step_s"]
                    shared = {"baseline_s": baseline, "link": model["link"], "parameters": model["parameters"]}
                    found[name, way] = {**row, **shared, "file": path.name}
    return found


def steps(found: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    lines = [
        "| model (parameters) | way | step ms | over plain | over max(plain, link) | V100, source documents "
        "| best accuracy | weights equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        for i, way in enumerate(WAYS):
            row = found.get((name, way))
            if row is None:
                continue
            seeds = f"{SEEDS_S[name][i] / SEEDS_S[name][0]:.2f}x" if i < 5 else ""
            bound = max(row["baseline_s"], row["link"]["both_s"])
            label = f"{name} ({row['parameters']:,})" if way == "baseline" else ""
            mark = "" if row["file"] == found[name, "baseline"]["file"] else " *"
            lines.append(
                f"| {label} | {way}{mark} | {row['step_s'] * 1e3:.2f} | {row['step_s'] / row['baseline_s']:.2f}x | "
                f"{row['step_s'] / bound:.2f}x | {seeds} | {row['best_accuracy']:.3f} | "
                f"{'yes' if row['weights_equal'] else 'no'} |"
            )
    return lines


def verdict(found: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """Whether ours meets the aim."""
    lines = [f"The aim is {AIM:.2f}x of the bound; rounds are those of plain training and of ours, in turn:", ""]
    for name in MODELS:
        if (row := found.get((name, "outcore"))) is None:
            continue
        plain_s, both_s = row["baseline_s"], row["link"]["both_s"]
        ratio = row["step_s"] / max(plain_s, both_s)
        best = f", fastest round {min(row['rounds_s']) * 1e3:.2f}" if "rounds_s" in row else ""
        lines.append(
            f"- {name}: plain step {plain_s * 1e3:.2f} ms, link {both_s * 1e3:.2f} ms, "
            f"ours {row['step_s'] * 1e3:.2f} ms{best}: {ratio:.2f}x, {'met' if ratio <= AIM else 'missed'}."
        )
    return lines


def trips(found: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    kinds = ("mean", "max", "min", "median")
    lines = [
        "| model | way | "
        + " | ".join(f"to GPU {k}" for k in kinds)
        + " | "
        + " | ".join(f"to CPU {k}" for k in kinds)
        + " |",
        "|---|---|" + "---|" * 8,
    ]
    for name in MODELS:
        for way in WAYS:
            row = found.get((name, way))
            if row is None or not row["trips"]:
                continue
            times = [row["trips"][to][k] * 1e3 for to in ("to_device", "to_host") for k in kinds]
            lines.append(f"| {name} | {way} | " + " | ".join(f"{t:.2f}" for t in times) + " |")
    return lines


def main() -> None:
    found = rows()
    readme = HERE / "README.md"
    head, _, rest = readme.read_text().partition(MARK)
    _, _, tail = rest.partition(MARK)
    body = "\n".join(
        ["", *verdict(found), "", *steps(found), "", "Milliseconds per step that copies take:", "", *trips(found), ""]
    )
    readme.write_text(f"{head}{MARK}\n{body}\n{MARK}{tail}")


if __name__ == "__main__":
    main()
