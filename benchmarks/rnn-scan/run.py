"""Scan against cuDNN: backward pass and whole training step over length, hidden size and batch.

python benchmarks/rnn-scan/run.py --out results/            # everything, about five minutes on an H200
python benchmarks/rnn-scan/run.py --out results/ --quick    # correctness and a few points, one minute
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from exactness import correctness, memory, training_curve
from graphs import graph_table, graphed
from setting import settings
from sizes import sizes
from speed import automatic, measure, table

from outcore.scan.choice import choices


def environment() -> dict[str, Any]:
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--part",
        choices=["correctness", "long", "rest", "automatic", "graphs", "memory", "sizes"],
        help="only correctness (may share the device), the longest sequences and small layers, all but correctness, "
        "torch's step and the automatic one in turns, CUDA graphs, memory and training, or how sweeps are cut up",
    )
    parser.add_argument("--cell", choices=["RNN", "GRU", "LSTM"], help="only correctness of this one")
    parser.add_argument("--seconds", type=float, default=360, help="stop starting new rows after this long")
    parser.add_argument("--table", nargs="+", type=Path, metavar="JSON", help="only print the table of result files")
    args = parser.parse_args()
    if args.table:
        rows = [path for path in args.table if not path.stem.endswith("graphs")]
        print(table(rows))
        for path in set(args.table) - set(rows):
            print(graph_table(path))
        return
    began = time.perf_counter()

    def log(line: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f}s] {line}", flush=True)

    result: dict[str, Any] = {"environment": environment(), "quick": args.quick}
    words = [str(datetime.date.today()), "quick" if args.quick else None, args.part, args.cell]
    path = args.out / f"{'-'.join(filter(None, words))}.json"
    args.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        result["choices"] = {key: asdict(timing) for key, timing in choices.timings.items()}
        path.write_text(json.dumps(result, indent=1) + "\n")

    log(str(result["environment"]))
    if args.part == "sizes":
        result["sizes"] = {}
        sizes(log, save, result["sizes"])
        return
    if args.part == "automatic":
        result["automatic"] = []
        for setting in [s for s in settings(False) if s.steps <= 3000 and s.hidden <= 128]:
            result["automatic"].append(automatic(setting, log))
            save()
        return
    if args.part == "graphs":
        result["graphs"] = []
        for setting in settings(False):
            if setting.steps == 30000:
                try:
                    result["graphs"].append(graphed(setting, log))
                except Exception as error:
                    log(f"FAILED {setting}: {type(error).__name__}: {error}")
                    result["graphs"].append(asdict(setting) | {"failed": str(error)[:300]})
                save()
        return
    if args.part in (None, "correctness"):
        result["correctness"] = correctness(log, args.cell)
        save()
    if args.part == "correctness":
        return
    if args.part != "long":
        result["memory"] = memory(log)
        result["training"] = [training_curve(30 if args.quick else 300, 1000, lr, log) for lr in (1e-5, 3e-4)]
        save()
    if args.part == "memory":
        return
    result["rows"] = []
    chosen = settings(args.quick)
    if args.part == "long":
        chosen = [s for s in chosen if s.steps == 30000 or s.batch == 2 or s.hidden == 8]
        chosen.sort(key=lambda s: (s.hidden != 20, s.cell != "RNN", s.every_step))
    for setting in chosen:
        if time.perf_counter() - began > args.seconds:
            log(f"out of time before {setting}")
            continue
        try:
            result["rows"].append(asdict(measure(setting, 3 if setting.steps > 5000 else 7, log)))
        except Exception as error:
            log(f"FAILED {setting}: {type(error).__name__}: {error}")
            result["rows"].append(asdict(setting) | {"failed": str(error)})
        save()


if __name__ == "__main__":
    main()
