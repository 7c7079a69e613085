"""What the training application adds to a step, and whether budgets and predictions hold, on whole slides.

    python benchmarks/train-application/run.py --out results.json [--device cuda] [--small]

Each case is a run of `outcore train` on synthetic slides. The figures are read back from the run's own files.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from outcore.data import write_slides
from outcore.train.application import train
from outcore.train.config import Config

JOB = """
import torch
from outcore.models import {model}
from outcore.models.slidenet import PixelNorm

def model():
    return {make}

def batch(size):
    return torch.rand(size, 3, {side}, {side}), torch.randint(2, (size,))

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
"""
LARGE = [
    ("SlideNet", "SlideNet(width=32, depth=2)", 16384, "1GiB", "fp32"),
    ("ResNet110V2", "ResNet110V2(classes=2, norm=PixelNorm)", 4096, "6GiB", "bf16"),
]
SMALL = [("SlideNet", "SlideNet()", 1024, "12MiB", "fp32")]


def case(folder: Path, model: str, make: str, side: int, budget: str, precision: str, device: str) -> dict:
    """One run; what it said of itself."""
    began = time.perf_counter()
    table = write_slides(folder / f"slides-{side}", 1, size=(side, side), share=0.3)
    written_s = time.perf_counter() - began
    job = folder / f"{model}.py"
    job.write_text(JOB.format(model=model, make=make, side=side))
    settings = {
        "job": str(job),
        "data": {"train": str(table), "mean": [0.85] * 3, "std": [0.15] * 3},
        "plan": {"memory": budget},
        "train": {"epochs": 4, "device": device, "precision": precision},
        "out": str(folder / f"run-{model}"),
    }
    began = time.perf_counter()
    code = train(Config.read(settings), Console(width=120))
    wall_s = time.perf_counter() - began
    facts = json.loads((folder / f"run-{model}" / "run.json").read_text())
    measured, forecast = facts["measured"], facts["forecast"]
    return {
        "model": make,
        "side": side,
        "precision": precision,
        "code": code,
        "budget_bytes": facts["budget_bytes"],
        "plain_peak_bytes": forecast["peak_bytes"],
        "planned_peak_bytes": forecast["planned_peak_bytes"],
        "measured_peak_bytes": measured["peak_bytes"],
        "plain_step_s": forecast["step_s"],
        "planned_step_s": forecast["planned_step_s"],
        "measured_step_s": measured["step_s"],
        "first_step_s": measured["first_step_s"],
        "bookkeeping_s": measured["bookkeeping_s"],
        "bookkeeping_share": measured["bookkeeping_s"] / measured["step_s"],
        "decisions": forecast["decisions"],
        "slide_written_s": written_s,
        "wall_s": wall_s,
    }


def main() -> None:
    """Run the cases and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    found = {"torch": torch.__version__, "device": name, "cases": []}
    with tempfile.TemporaryDirectory() as folder:
        for row in SMALL if arguments.small else LARGE:
            try:
                found["cases"].append(case(Path(folder), *row, arguments.device))
            except Exception as error:  # a case that fails stays in the table
                found["cases"].append({"model": row[1], "side": row[2], "error": f"{type(error).__name__}: {error}"})
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(found["cases"][-1], indent=1), flush=True)


if __name__ == "__main__":
    main()
