"""What compiled steps as CUDA graphs take, attempt by attempt, beside what was predicted.

    python benchmarks/within-compiled/graph_memory.py --out DIR

Runs the tests of compiled CUDA graphs, each in a process of its own, and beside them two networks whose attempts are
written down: the predicted peak, the measured one, what is reserved for graphs and elsewhere, and what after
an attempt was discarded. About a minute on one GPU. Writes `graphs.json` and the output of the tests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

TESTS = ("test_a_step_as_graphs_trains_as_plain_within_its_budget", "test_graphs_hold_under_a_hard_limit")


def reserved() -> dict[str, int]:
    """Reserved bytes by pool, and those in use."""
    import torch

    found = {"all": torch.cuda.memory_reserved(), "in use": torch.cuda.memory_allocated()}
    for segment in torch.cuda.memory_snapshot():
        name = f"pool {tuple(segment['segment_pool_id'])}"
        found[name] = found.get(name, 0) + segment["total_size"]
    return found


def attempts(rows: int, memory: str) -> dict[str, Any]:
    """A network of small layers under a plan with CUDA graphs."""
    import torch

    import outcore
    from outcore.compiled.compiled_forward import CompiledForward
    from outcore.compiled.pieces import peak_of
    from tests.compiled.test_graphs_gpu import network

    seen: list[dict[str, Any]] = []
    tried, discarded = CompiledForward._try, CompiledForward.discard

    def attempt(self: Any, entry: Any, args: Any, kwargs: Any) -> int | None:
        start = time.perf_counter()
        taken = tried(self, entry, args, kwargs)
        pieces = entry.chooser.pieces
        seen.append(
            {
                "graphs": self.as_graphs,
                "predicted": peak_of([p.chosen for p in pieces]),
                "least": peak_of([p.frontier.least for p in pieces]),
                "taken": taken,
                "step_s": self.measured_s,
                "predicted_s": sum(p.chosen.seconds for p in pieces),
                "skipped": self.skipped,
                "took_s": time.perf_counter() - start,
                "reserved": reserved(),
            }
        )
        return taken

    def discard(self: Any, entry: Any = None) -> None:
        discarded(self, entry)
        torch.cuda.empty_cache()
        if seen:
            seen[-1]["after discarding"] = reserved()

    CompiledForward._try, CompiledForward.discard = attempt, discard  # type: ignore[method-assign]
    device = torch.device("cuda", torch.cuda.current_device())
    model, batch = network(device), torch.randn(rows, 256, device=device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    result: dict[str, Any] = {"rows": rows, "memory": memory, "attempts": seen}
    try:
        outcore.within(model, (batch,), memory=memory, compile=True, graphs=True, optimizer=optimizer)
        result["plan"] = outcore.memory_plan(model).explain().splitlines()
    except Exception as error:  # what failed is a result too
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        CompiledForward._try, CompiledForward.discard = tried, discarded  # type: ignore[method-assign]
    return result


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", help="ROWS,MEMORY of one network, in this process")
    given = parser.parse_args()
    if given.one:
        rows, memory = given.one.split(",")
        found = attempts(int(rows), memory)
        (given.out / f"attempts-{rows}.json").write_text(json.dumps(found, indent=1))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    processes = {}
    for name in TESTS:
        command = ["-m", "pytest", f"tests/compiled/test_graphs_gpu.py::{name}", "--show-capture=no", "-s"]
        output = (given.out / f"{name}.txt").open("w")
        processes[name] = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output, cwd=ROOT)
    for one in ("4096,90%", "32768,60%"):
        command = [__file__, "--out", str(given.out), "--one", one]
        processes[one] = subprocess.Popen([sys.executable, *command], cwd=ROOT)
    codes = {name: process.wait() for name, process in processes.items()}
    found = [json.loads(path.read_text()) for path in sorted(given.out.glob("attempts-*.json"))]
    (given.out / "graphs.json").write_text(json.dumps({"codes": codes, "networks": found}, indent=1))
    print(json.dumps({"codes": codes, "networks": found}, indent=1))
    for name in TESTS:
        print((given.out / f"{name}.txt").read_text()[-1500:])


if __name__ == "__main__":
    main()
