"""Borders that travel while the rest is computed, on a slow link: python benchmarks/unet-grid/overlap.py; needs root.

Two ranks on two hosts, which are network namespaces (`benchmarks/whatif-links/hosts.py`), share one image of a chain of
convolutions. The same network is trained with borders sent after a layer and ahead of it, at several rates of the link;
printed are the seconds of a step and those in which a rank waits for messages, medians of the ranks' own timelines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "whatif-links"))

PORT = "29577"


def worker(early: bool, pixels: int, steps: int, out: str) -> None:
    """One rank."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import outcore
    from outcore.run import Engine
    from outcore.spatial.stage_layout import layout_of_stage

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in ((3, 16), (16, 16), (16, 16), (16, 16), (16, 2)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
    # A pool at the end: a map would be gathered on one rank, which nothing hides.
    model, x = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)), torch.randn(1, 3, pixels, pixels)
    graph = outcore.capture(model, x)
    spatial: dict[str, Any] = {"grid": [1, 2]}
    if early:
        spatial["early"] = list(layout_of_stage(graph, frozenset(graph.calls), spatial).exchanges)
    plan = outcore.Plan(graph.fingerprint, (("",),), spatial=spatial, exactness="reassociated")
    target = torch.zeros(1, 2, 1, 1)
    rows = []
    with Engine(model, plan, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), example=x) as engine:
        for step in range(steps + 2):
            engine.world.barrier()
            began = time.perf_counter()
            loss = engine.step(x, target)
            took = time.perf_counter() - began
            timeline = engine.timeline()
            mine = [e for e in timeline.events if e.rank == engine.rank and e.kind in ("forward", "backward")]
            inside = sum(
                max(e.end_s for e in mine if e.kind == kind) - min(e.start_s for e in mine if e.kind == kind)
                for kind in ("forward", "backward")
            )
            if step >= 2:
                rows.append((took, inside - sum(e.end_s - e.start_s for e in mine), loss))
        if engine.rank == 0:
            Path(out).write_text(json.dumps(rows))


def measure(rate_mbit: float, early: bool, pixels: int, steps: int) -> dict[str, Any]:
    from hosts import address, hosts, on_host

    out = Path(f"/tmp/overlap-{os.getpid()}.json")
    with hosts(2, rate_mbit, prefix=f"ocv{os.getpid()}x") as names:
        started = []
        for rank, name in enumerate(names):
            env = {
                **os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": address(0), "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": "eth0",
            }  # fmt: skip
            words = [sys.executable, __file__, "--worker", json.dumps([early, pixels, steps, str(out)])]
            started.append(subprocess.Popen(on_host(name, *words), env=env))
        for process in started:
            if process.wait(timeout=400):
                raise RuntimeError("a rank failed")
    rows = json.loads(out.read_text())
    out.unlink()
    return {
        "rate_mbit": rate_mbit,
        "early": early,
        "pixels": pixels,
        "step_s": statistics.median(row[0] for row in rows),
        "waits_s": statistics.median(row[1] for row in rows),
        "loss": rows[-1][2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", default=None)
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="*", default=[20.0, 100.0])
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if given.worker is not None:
        worker(*json.loads(given.worker))
        return
    rows = []
    for rate in given.rates:
        for early in (False, True):
            rows.append(measure(rate, early, given.pixels, given.steps))
            row = rows[-1]
            when = "ahead" if early else "after"
            print(
                f"{rate:g} Mbit/s, borders {when}: step {row['step_s']:.3f} s, waits {row['waits_s']:.3f} s", flush=True
            )
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
