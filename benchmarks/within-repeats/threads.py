"""Which convolutions have another algorithm in backward's thread, and what that does to gradients.

    python benchmarks/within-repeats/threads.py --out DIR [--networks unet,resnet50,unet3d] [--share 0.4]

One process for each network of `benchmarks/frontier` (batches of small images, bf16, channels last, cuDNN's search on).
It trains plainly twice, then with `torch.utils.checkpoint` around every block, which makes convolutions again in
backward's thread, and under a bitwise plan at a share of plain's reserved memory, once as if nothing was known of the
two threads and once as users have it; and counts the gradients that are equal to plain's bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]


def one(name: str, share: float) -> dict[str, Any]:
    """A network's row."""
    import torch

    import outcore
    from benchmarks.frontier import peers
    from benchmarks.frontier.networks import loss_of
    from benchmarks.frontier.training import Case, Training, alike, reset_peaks
    from outcore.errors import PlanError
    from outcore.memory.saved_tensors import cudnn_search

    torch.backends.cudnn.benchmark = True
    case = Case(name, "batch", True)
    plain = case.fresh("cuda", True)
    state = plain.state()
    reset_peaks("cuda")
    want = plain.gradients(state)
    plain.step()
    budget = int(share * torch.cuda.max_memory_reserved())
    row: dict[str, Any] = {"network": case.label, "plain again": alike(plain.gradients(state), want)}
    graph = outcore.capture(plain.model, plain.args, plain.kwargs)
    found = cudnn_search.convolutions(graph, graph.calls)
    device = torch.device("cuda", torch.cuda.current_device())
    differ = cudnn_search.differing(graph, found, device)
    row |= {"convolutions": len(found), "differ": len(differ), "which": sorted(differ)[:8]}

    def compared(training: Training) -> dict[str, Any]:
        training.model.load_state_dict(state)
        return alike(training.gradients(state), want)

    checkpointed = case.fresh("cuda", True)
    peers.apply(case, "checkpoint fine", checkpointed)
    row["checkpoint fine"] = alike(checkpointed.gradients(state), want)
    for told in (False, True):
        training = case.fresh("cuda", True)
        reset_peaks("cuda")
        managed: dict[str, Any] = {"loss": loss_of, "optimizer": training.optimizer, "quiet": True, "graphs": False}
        with contextlib.nullcontext() if told else _unknown(cudnn_search):
            try:
                outcore.within(training.model, training.args, training.kwargs, memory=budget, **managed)
            except PlanError as refused:
                row[f"plan, threads {'known' if told else 'unknown'}"] = {"refused": str(refused)[:300]}
                continue
            plan: Any = outcore.memory_plan(training.model)
            again = cudnn_search.convolutions(graph, cudnn_search.made_again(plan))
            facts = {"made again": len(again), "of them differ": len(differ.intersection(again))}
            facts |= {"budget": budget, "predicted x": plan.slowdown}
            row[f"plan, threads {'known' if told else 'unknown'}"] = compared(training) | facts
    return row


@contextlib.contextmanager
def _unknown(module: Any) -> Iterator[None]:
    """As if no algorithm was searched for."""
    with patch.object(module, "searches", lambda device: False):
        yield


def main() -> None:
    """Run all of them, side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--networks", default="unet,resnet50,unet3d,densenet121")
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--limit", type=float, default=240)
    parser.add_argument("--one", help="what one process does")
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(one(given.one, given.share)), flush=True)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    begun = []
    for name in given.networks.split(","):
        words = [sys.executable, __file__, "--out", str(given.out), "--share", str(given.share), "--one", name]
        env = {**os.environ, "OUTCORE_CACHE": tempfile.mkdtemp()}
        begun.append(
            (name, subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        )
    until, rows = time.monotonic() + given.limit, []
    for name, process in begun:
        try:
            said, errors = process.communicate(timeout=max(1.0, until - time.monotonic()))
            rows.append(
                json.loads(said.splitlines()[-1])
                if process.returncode == 0
                else {"network": name, "error": errors[-800:]}
            )
        except subprocess.TimeoutExpired:
            process.kill()
            rows.append({"network": name, "error": f"took more than {given.limit:.0f} s"})
        print(json.dumps(rows[-1]), flush=True)
        (given.out / "threads.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
