"""64 trials with ASHA, sixteen at a time and one by one in plain PyTorch: training time, and the best trial of each.

    python run.py --out results/DATE-h200.json --job images.py --device cuda --steps 128 --every 16 --search random
    python run.py --out results/DATE-cpu.json

With ``--search random`` both see the same 64 configurations, so the best of one can be looked for in the other. Before
either, libraries are imported and one model is trained for a few steps by plain PyTorch, so loading counts for none.
All else does: recording, checking and compiling the fused step is in its training time. A way that is named twice runs
twice.

Training in TF32 is chaotic, so two sweeps need not end with the same best trial. How good a configuration is, and how
much that varies, say ``--again 0,1``, which trains every one to the end, without pruning, fused and from the first
weights and on the batches of these seeds, and ``--plain-again 0,1``, which does the same in plain PyTorch (``--share
0/3``: a third of them). ``--channels-last`` lets plain PyTorch round otherwise, ``--strict`` computes in full float32.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src")]

from outcore.fusion.sweep.optuna_tuner import Tuner  # noqa: E402
from outcore.fusion.sweep.space import parse_settings  # noqa: E402
from outcore.fusion.sweep.sweep import Sweep, SweepOptions  # noqa: E402
from outcore.fusion.sweep.trials import Trial  # noqa: E402

SPACE = ("lr=1e-4:3e-1:log", "weight_decay=1e-6:1e-1:log", "beta1=0.5:0.99")
HELD_OUT = 4


def tuner(directory: Path, given: argparse.Namespace, seed: int, pruner: str = "asha") -> Tuner:
    settings = parse_settings(list(SPACE))
    return Tuner(
        settings, directory, trials=given.trials, search=given.search, pruner=pruner, interval=given.every,
        steps=given.steps, seed=seed, remember=not given.forget,
    )  # fmt: skip


def together(
    directory: Path,
    given: argparse.Namespace,
    seed: int,
    *,
    pruner: str = "asha",
    weights: int = 0,
    narrow: bool = True,
) -> dict[str, Any]:
    """Sixteen trials at a time, fused."""
    options = SweepOptions(
        given.job, directory, steps=given.steps, interval=given.every, members=given.members, held_out=HELD_OUT,
        device=given.device, measure=given.measure, seed=weights, narrow=narrow,
    )  # fmt: skip
    marks: list[tuple[float, int]] = []

    def mark(sweep: Sweep) -> None:
        marks.append((round(sweep.seconds, 4), sweep.member_steps))

    running = Sweep(options, tuner(directory, given, seed, pruner), on_change=mark)
    results = running.run()
    return {
        "training_s": running.seconds, "member_steps": running.member_steps,
        "first_interval_s": marks[0][0], "intervals": len(marks), "marks": marks,
        "ways": [str(choice.way) for choice in running.choices],
        "predicted_speedup": [choice.speedup for choice in running.choices], "achieved_speedup": running.achieved(),
        "trials": [{"number": r.number, "state": r.state, "value": r.value, **r.settings} for r in results],
    }  # fmt: skip


class Plain:
    """One trial in plain PyTorch."""

    def __init__(self, job: dict[str, Any], trial: Trial, given: argparse.Namespace, weights: int = 0) -> None:
        torch.manual_seed(weights)
        self.loss, self.trial, self.done = job["loss"], trial, 0
        form = torch.channels_last if given.channels_last else torch.contiguous_format
        self.model = job["model"]().to(given.device, memory_format=form).train()
        self.optimizer = job["optimizer"](self.model.parameters())
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = trial.settings["lr"], trial.settings["weight_decay"]
            group["betas"] = (trial.settings["beta1"], group["betas"][1])

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """One step."""
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimizer.step()

    def judge(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """The mean loss in eval mode."""
        self.model.eval()
        with torch.no_grad():
            value = sum(float(self.loss(self.model(x), y)) for x, y in batches) / len(batches)
        self.model.train()
        return value


def batch_of(job: dict[str, Any], device: str, number: int, weights: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of a step, the same that the fused sweep draws; held-out ones have negative numbers."""
    torch.manual_seed(weights * 1_000_003 + number + 100_000)
    x, y = job["batch"](job["size"])
    return x.to(device), y.to(device)


def to_the_end(directory: Path, given: argparse.Namespace, seed: int, weights: int) -> dict[str, Any]:
    """Every configuration, or a share of them, in plain PyTorch without pruning."""
    job, source = runpy.run_path(given.job), tuner(directory, given, seed, "none")
    part, parts = map(int, given.share.split("/"))
    batches = [batch_of(job, given.device, number, weights) for number in range(given.steps)]
    judged_on = [batch_of(job, given.device, -1 - n, weights) for n in range(HELD_OUT)]
    begun, trials = time.perf_counter(), []
    while (trial := source.ask()) is not None:
        if trial.number % parts != part:
            continue
        one = Plain(job, trial, given, weights)
        for x, y in batches:
            one.train(x, y)
        value = one.judge(judged_on)
        state = "complete" if math.isfinite(value) else "diverged"
        trials.append({"number": trial.number, "state": state, "value": value, **trial.settings})
    return {"training_s": time.perf_counter() - begun, "member_steps": given.steps * len(trials), "trials": trials}


def one_by_one(directory: Path, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What one writes without outcore: a loop over trials around a loop over steps.

    By default trials take turns, as many as are trained at a time otherwise and on the same batches, so that ASHA has
    the same to compare; with ``--order alone`` each is trained until it is given up, and the next begins.
    """
    job, source = runpy.run_path(given.job), tuner(directory, given, seed)
    wait = torch.cuda.synchronize if given.device == "cuda" else lambda: None
    at_once = given.members if given.order == "turns" else 1

    batch = partial(batch_of, job, given.device)
    judged_on = [batch(-1 - n) for n in range(HELD_OUT)]
    trials, steps, spent, step, marks = [], 0, 0.0, 0, []
    running: list[Plain] = []
    while True:
        while len(running) < at_once and (trial := source.ask()) is not None:
            running.append(Plain(job, trial, given))
        if not running:
            break
        first, values = (step if at_once > 1 else running[0].done), {}
        begun = time.perf_counter()
        for one in running:
            for number in range(first, first + given.every):
                one.train(*batch(number))
            values[one.trial.number] = one.judge(judged_on)
        wait()
        spent += time.perf_counter() - begun
        step, steps = step + given.every, steps + given.every * len(running)
        marks.append((round(spent, 4), steps))
        for one in running:
            one.done += given.every
            if math.isfinite(values[one.trial.number]):
                source.report(one.trial.number, one.done, values[one.trial.number])
        for one in list(running):
            number, value = one.trial.number, values[one.trial.number]
            if not math.isfinite(value):
                state = "diverged"
            elif one.done >= given.steps:
                state = "complete"
            elif source.hopeless(number):
                state = "pruned"
            else:
                continue
            source.tell(number, state, value if state != "diverged" else None)
            trials.append({"number": number, "state": state, "value": value, **one.trial.settings})
            running.remove(one)
    return {"training_s": spent, "member_steps": steps, "order": given.order, "marks": marks, "trials": trials}


def warm(given: argparse.Namespace) -> None:
    """Load what every training needs, and the libraries that only an array needs."""
    import safetensors.torch  # noqa: F401

    if given.device == "cuda":
        import triton  # noqa: F401
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
    parser.add_argument("--ways", default="together,one-by-one", help="sweeps; wide keeps empty slots to the end")
    parser.add_argument("--again", default="", help="seeds to train all configurations to the end from, fused")
    parser.add_argument("--plain-again", default="", help="the same in plain PyTorch")
    parser.add_argument("--share", default="0/1", help="which of how many shares of them")
    parser.add_argument("--strict", action="store_true", help="without TF32")
    parser.add_argument("--channels-last", action="store_true", help="plain PyTorch with another order of memory")
    parser.add_argument("--order", default="turns", choices=("turns", "alone"), help="of trials one by one")
    run(parser.parse_args())


def run(given: argparse.Namespace) -> None:
    """Both ways, for every seed; rows are written as they come."""
    facts = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else given.device,
        "machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "steps": given.steps, "every": given.every, "search": given.search,
        "job": Path(given.job).name, "date": time.strftime("%Y-%m-%d"), "strict": given.strict,
    }  # fmt: skip
    if given.strict:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows: list[dict[str, Any]] = []
    warm(given)

    def add(row: dict[str, Any], train: Callable[[Path], dict[str, Any]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            begun, used = time.perf_counter(), time.process_time()
            row |= train(Path(folder))
        row["wall_s"], row["cpu_s"] = time.perf_counter() - begun, time.process_time() - used
        complete = [t for t in row["trials"] if t["state"] == "complete"]
        row["best"] = min(complete, key=lambda t: t["value"]) if complete else None
        row["states"] = {s: sum(t["state"] == s for t in row["trials"]) for s in ("complete", "pruned", "diverged")}
        rows.append(row)
        print({k: v for k, v in row.items() if k not in ("trials", "marks")}, flush=True)
        given.out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1))

    plainly = {"channels_last": True} if given.channels_last else {}
    for seed in map(int, given.seeds.split(",")):
        for way in given.ways.split(","):
            facts_of = {"seed": seed, "members": given.members} | ({"wide": True} if way == "wide" else {})
            if way == "one-by-one":
                add(facts_of | {"members": 1} | plainly, partial(one_by_one, given=given, seed=seed))
            elif way != "none":
                add(facts_of, partial(together, given=given, seed=seed, narrow=way != "wide"))
        for members, asked in ((given.members, given.again), (1, given.plain_again)):
            for weights in map(int, filter(None, asked.split(","))):
                more = {"seed": seed, "members": members, "pruner": "none", "weights": weights}
                if members == 1:
                    add(more | plainly, partial(to_the_end, given=given, seed=seed, weights=weights))
                else:
                    add(more, partial(together, given=given, seed=seed, pruner="none", weights=weights))


if __name__ == "__main__":
    main()
