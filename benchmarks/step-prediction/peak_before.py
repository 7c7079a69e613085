"""The peak of a step as it is said before anything was run: no call was measured, and no device is there.

    python benchmarks/step-prediction/peak_before.py results/2026-11-16-cuda.json ... --out results/DATE-before.json

The network is captured on shapes, its operations are estimated for an H200, and the memory curve follows from what
each operation saves. The peaks to compare with are those of stored runs. What libraries take as workspace, and what a
GPU's own kernels save where a CPU's save something else, is not known here; the peak predicted from measured calls, in
the same stored rows, has both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(Path(__file__).parent)]

from tests.foreign.shim import define_torchvision_operators  # noqa: E402

define_torchvision_operators()

import networks  # noqa: E402
import torch  # noqa: E402

import outcore  # noqa: E402
from outcore.cost.predicted.step_memory import memory_curve  # noqa: E402
from outcore.machine import parse  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    device = parse("h200").devices[0]
    stored = {
        (row["network"], row["batch"], row["precision"]): row
        for path in given.results
        for row in json.loads(path.read_text())["rows"]
        if "error" not in row
    }
    end = time.monotonic() + given.seconds
    rows: list[dict[str, Any]] = []
    for (name, batch, precision), row in stored.items():
        if time.monotonic() > end:
            break
        graph = networks.captured(networks.GPU[name], row)
        curve = memory_curve(graph, outcore.estimate(graph, device), optimizer=torch.optim.Adam)
        found = {"network": name, "batch": batch, "precision": precision, "said_bytes": curve.peak_bytes}
        rows.append(found | {key: row[key] for key in ("measured_bytes", "predicted_bytes", "library_bytes")})
        error = curve.peak_bytes / row["measured_bytes"] - 1
        print(name, batch, precision, f"{error:+.1%}", flush=True)
        facts = {"torch": torch.__version__, "of": [path.name for path in given.results], "cases": len(stored)}
        given.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    errors = sorted(abs(row["said_bytes"] / row["measured_bytes"] - 1) for row in rows)
    print(f"{len(errors)} cases: median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}")


if __name__ == "__main__":
    main()
