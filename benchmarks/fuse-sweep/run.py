"""64 trials with ASHA, sixteen at a time and one by one in plain PyTorch: training time, and the best trial of each.

    python run.py --out results/DATE-h200.json --job images.py --device cuda --steps 128 --every 16 --search random
    python run.py --out results/DATE-cpu.json

With ``--search random`` both see the same 64 configurations, so the best of one can be looked for in the other. Before
either, one model is trained for a few steps by plain PyTorch, so loading libraries counts for none. All else does:
recording, checking and compiling the fused step is in its training time.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src")]

from outcore.fusion.space import parse_settings  # noqa: E402
from outcore.fusion.sweep import Options, Sweep  # noqa: E402
from outcore.fusion.tuner import Tuner  # noqa: E402

SPACE = ("lr=1e-4:3e-1:log", "weight_decay=1e-6:1e-1:log", "beta1=0.5:0.99")
HELD_OUT = 4


def tuner(directory: Path, given: argparse.Namespace, seed: int) -> Tuner:
    settings = parse_settings(list(SPACE))
    return Tuner(
        settings, directory, trials=given.trials, search=given.search, pruner="asha", interval=given.every,
        steps=given.steps, seed=seed, remember=not given.forget,
    )  # fmt: skip


def together(directory: Path, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Sixteen trials at a time, fused."""
    options = Options(
        given.job, directory, steps=given.steps, interval=given.every, members=given.members, held_out=HELD_OUT,
        device=given.device, measure=given.measure,
    )  # fmt: skip
    marks: list[float] = []
    running = Sweep(options, tuner(directory, given, seed), on_change=lambda sweep: marks.append(sweep.seconds))
    results = running.run()
    return {
        "training_s": running.seconds, "member_steps": running.member_steps,
        "first_interval_s": marks[0], "intervals": len(marks),
        "ways": [str(choice.way) for choice in running.choices],
        "predicted_speedup": [choice.speedup for choice in running.choices], "achieved_speedup": running.achieved(),
        "trials": [{"number": r.number, "state": r.state, "value": r.value, **r.settings} for r in results],
    }  # fmt: skip


def one_by_one(directory: Path, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What one writes without outcore: a loop over trials around a loop over steps."""
    job, source = runpy.run_path(given.job), tuner(directory, given, seed)
    wait = torch.cuda.synchronize if given.device == "cuda" else lambda: None

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(number + 100_000)
        x, y = job["batch"](job["size"])
        return x.to(given.device), y.to(given.device)

    judged_on = [batch(-1 - n) for n in range(HELD_OUT)]
    trials, steps, spent = [], 0, 0.0
    while (trial := source.ask()) is not None:
        torch.manual_seed(0)
        model = job["model"]().to(given.device).train()
        optimizer = job["optimizer"](model.parameters())
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = trial.settings["lr"], trial.settings["weight_decay"]
            group["betas"] = (trial.settings["beta1"], group["betas"][1])
        done, state, value = 0, "running", math.inf
        while state == "running":
            begun = time.perf_counter()
            for number in range(done, done + given.every):
                x, y = batch(number)
                optimizer.zero_grad()
                job["loss"](model(x), y).backward()
                optimizer.step()
            done += given.every
            model.eval()
            with torch.no_grad():
                value = sum(float(job["loss"](model(x), y)) for x, y in judged_on) / HELD_OUT
            model.train()
            wait()
            spent += time.perf_counter() - begun
            steps += given.every
            if not math.isfinite(value):
                state = "diverged"
            else:
                source.report(trial.number, done, value)
                if done >= given.steps:
                    state = "complete"
                elif source.hopeless(trial.number):
                    state = "pruned"
        source.tell(trial.number, state, value if state != "diverged" else None)
        trials.append({"number": trial.number, "state": state, "value": value, **trial.settings})
    return {"training_s": spent, "member_steps": steps, "trials": trials}


def warm(given: argparse.Namespace) -> None:
    """Load what every training needs."""
    job = runpy.run_path(given.job)
    model, (x, y) = job["model"]().to(given.device), job["batch"](job["size"])
    optimizer = job["optimizer"](model.parameters())
    for _ in range(3):
        job["loss"](model(x.to(given.device)), y.to(given.device)).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--job", default=str(Path(__file__).with_name("job.py")))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--search", default="tpe")
    parser.add_argument("--measure", action="store_true", help="choose the way of running by trying")
    parser.add_argument("--forget", action="store_true", help="keep the studies in memory, not in SQLite")
    run(parser.parse_args())


def run(given: argparse.Namespace) -> None:
    """Both ways, for every seed; rows are written as they come."""
    facts = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else given.device,
        "machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "steps": given.steps, "every": given.every, "search": given.search,
        "job": Path(given.job).name, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    rows = []
    warm(given)
    for seed in map(int, given.seeds.split(",")):
        for members, train in ((given.members, together), (1, one_by_one)):
            with tempfile.TemporaryDirectory() as folder:
                begun, used = time.perf_counter(), time.process_time()
                row = {"members": members, "seed": seed} | train(Path(folder), given, seed)
            row["wall_s"], row["cpu_s"] = time.perf_counter() - begun, time.process_time() - used
            complete = [t for t in row["trials"] if t["state"] == "complete"]
            row["best"] = min(complete, key=lambda t: t["value"]) if complete else None
            row["states"] = {s: sum(t["state"] == s for t in row["trials"]) for s in ("complete", "pruned", "diverged")}
            rows.append(row)
            print({k: v for k, v in row.items() if k != "trials"}, flush=True)
            given.out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
