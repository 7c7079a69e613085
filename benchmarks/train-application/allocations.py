"""run.py, with every allocation of one tile recorded: what is alive on the device when its backward is at its peak.

    python benchmarks/train-application/allocations.py --tile 12 --found allocations.json -- --part slide --out x.json

What follows ``--`` is given to run.py.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from outcore.stream.execute.execution import Execution


class Recorder:
    """Stands before a tile's forward and around its backward."""

    def __init__(self, tile: int, found: Path) -> None:
        self.tile, self.found, self.number, self.before = tile, found, 0, 0
        self.rows: list[dict[str, int]] = []
        self._compute, self._grad = Execution.compute, torch.autograd.grad

    def compute(self, execution: Execution, *given: Any) -> Any:
        """A tile with gradients on is counted; the chosen one is recorded."""
        if torch.is_grad_enabled():
            self.number += 1
            self.before = torch.cuda.memory_allocated()
            if self.number == self.tile:
                torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=200_000)
        return self._compute(execution, *given)

    def grad(self, *given: Any, **options: Any) -> Any:
        """What is held when backward begins and when it is over."""
        held = torch.cuda.memory_allocated()
        made = self._grad(*given, **options)
        if self.number and len(self.rows) < self.number:
            self.rows.append({"before": self.before, "held": held, "after": torch.cuda.memory_allocated()})
            if self.number == self.tile:
                events = torch.cuda.memory._snapshot()["device_traces"][0]
                torch.cuda.memory._record_memory_history(None)
                row = {"tiles": self.rows, "tile": self.tile, **at_peak(events, self.before)}
                self.found.write_text(json.dumps(row, indent=1) + "\n")
        return made


def at_peak(events: list[dict[str, Any]], before: int) -> dict[str, Any]:
    """The peak above what was there before, and the sizes of what is alive then, the largest first."""
    alive: dict[int, int] = {}
    total = peak = before
    sizes: list[int] = []
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"]
            total += event["size"]
            if total > peak:
                peak, sizes = total, sorted(alive.values(), reverse=True)
        elif event["action"] == "free_completed":
            total -= event["size"]
            alive.pop(event["addr"], None)
    return {"peak_bytes": peak, "largest_bytes": sizes[:8], "allocations": len(sizes)}


def main() -> None:
    """Run run.py with the recorder in place."""
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tile", type=int, default=12, help="which of the tiles with gradients")
    parser.add_argument("--found", type=Path, default=Path("allocations.json"))
    arguments = parser.parse_args(sys.argv[1:split])
    recorder = Recorder(arguments.tile, arguments.found)
    Execution.compute = lambda execution, *given: recorder.compute(execution, *given)  # type: ignore[method-assign]
    torch.autograd.grad = recorder.grad
    script = Path(__file__).with_name("run.py")
    sys.argv = [str(script), *sys.argv[split + 1 :]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
