"""64 trials with TPE and ASHA, sixteen at a time and one at a time: total training time, and the best trial of each.

python run.py --out results/DATE-cpu.json [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src")]

from outcore.fusion.space import parse_settings  # noqa: E402
from outcore.fusion.sweep import Options, Sweep  # noqa: E402
from outcore.fusion.tuner import Tuner  # noqa: E402

STEPS, EVERY, TRIALS = 320, 20, 64


def sweep(members: int, device: str, seed: int) -> dict[str, object]:
    settings = parse_settings(["lr=1e-4:3e-1:log", "weight_decay=1e-6:1e-1:log", "beta1=0.5:0.99"])
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        tuner = Tuner(settings, directory, trials=TRIALS, pruner="asha", interval=EVERY, steps=STEPS, seed=seed)
        options = Options(
            str(Path(__file__).with_name("job.py")), directory, steps=STEPS, interval=EVERY, members=members,
            held_out=8, device=device, measure=False,
        )  # fmt: skip
        running = Sweep(options, tuner)
        begun = time.perf_counter()
        results = running.run()
        assert running.best is not None
        return {
            "members": members,
            "seed": seed,
            "training_s": running.seconds,
            "wall_s": time.perf_counter() - begun,
            "member_steps": running.member_steps,
            "trials": len(results),
            "states": {s: sum(r.state == s for r in results) for s in ("complete", "pruned", "diverged")},
            "best_loss": running.best.value,
            "best": running.best.settings,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", default="0,1")
    given = parser.parse_args()
    rows = []
    for seed in map(int, given.seeds.split(",")):
        for members in (16, 1):
            rows.append(sweep(members, given.device, seed))
            print(rows[-1], flush=True)
    facts = {
        "device": given.device,
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "steps": STEPS,
        "every": EVERY,
        "date": time.strftime("%Y-%m-%d"),
    }
    given.out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
