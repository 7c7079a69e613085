"""Borders that travel while the rest is computed, over a slow link: python benchmarks/unet-grid/overlap.py; needs root.

Two ranks on two hosts, which are network namespaces (`benchmarks/whatif-links/hosts.py`), share one image of a chain of
convolutions. The same network is trained with borders sent after a layer and ahead of it, in turns, in the same
processes, over links of several delays or rates. Printed are the seconds of a step, those in which a rank waits for
messages, and how much of the time in which messages are on their way lies under computing; traces of a step each way
are written beside the rows (`--out`), to be opened at ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "whatif-links"))

PORT = "29577"
SKIPPED = 2


def worker(pixels: int, steps: int, turns: int, folder: str) -> None:
    """One rank: both ways in turns."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import outcore
    from outcore.program import save_trace
    from outcore.run import Engine
    from outcore.spatial.stage_layout import layout_of_stage

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in ((3, 16), (16, 16), (16, 16), (16, 16), (16, 16), (16, 2)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
    # A pool at the end: a map would be gathered on one rank, which nothing hides.
    model, x = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)), torch.randn(1, 3, pixels, pixels)
    graph = outcore.capture(model, x)
    target = torch.zeros(1, 2, 1, 1)
    rows: dict[str, list[dict[str, float]]] = {"after": [], "ahead": []}
    for turn in range(turns):
        for when in ("after", "ahead"):
            spatial: dict[str, Any] = {"grid": [1, 2]}
            if when == "ahead":
                spatial["early"] = list(layout_of_stage(graph, frozenset(graph.calls), spatial).exchanges)
            plan = outcore.Plan(graph.fingerprint, (("",),), spatial=spatial, exactness="reassociated")
            torch.manual_seed(1)
            with Engine(
                model, plan, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), example=x, device="cpu"
            ) as engine:
                for step in range(steps + SKIPPED):
                    engine.world.barrier()
                    began = time.perf_counter()
                    loss = engine.step(x, target)
                    took = time.perf_counter() - began
                    timeline = engine.timeline()
                    if step >= SKIPPED:
                        rows[when].append({"step_s": took, "loss": loss, **_overlap(timeline, engine.rank)})
                rank = engine.rank
                if rank == 0 and turn == turns - 1:
                    save_trace(timeline, Path(folder) / f"{when}.trace.json")
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))


def _overlap(timeline: Any, rank: int) -> dict[str, float]:
    """Seconds in which a rank waits between the ends of its forward or backward, and what of its messages' time lies
    under computing."""
    mine = [e for e in timeline.events if e.rank == rank]
    computing = [(e.start_s, e.end_s) for e in mine if e.kind in ("forward", "backward")]
    inside = 0.0
    for kind in ("forward", "backward"):
        of = [e for e in mine if e.kind == kind]
        inside += max(e.end_s for e in of) - min(e.start_s for e in of)
    travel = hidden = 0.0
    for event in mine:
        if event.kind == "halo" and event.stream == "receive":
            travel += event.end_s - event.start_s
            hidden += sum(max(0.0, min(b, event.end_s) - max(a, event.start_s)) for a, b in computing)
    return {"waits_s": inside - sum(b - a for a, b in computing), "travel_s": travel, "hidden_s": hidden}


def measure(rate_mbit: float, delay_ms: float, pixels: int, steps: int, turns: int, keep: Path | None) -> Any:
    from hosts import address, hosts, on_host

    with (
        tempfile.TemporaryDirectory() as folder,
        hosts(2, rate_mbit, delay_ms, prefix=f"ocv{os.getpid()}x") as names,
    ):
        started = []
        for rank, name in enumerate(names):
            env = {
                **os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": address(0), "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": "eth0",
            }  # fmt: skip
            words = [sys.executable, __file__, "--worker", json.dumps([pixels, steps, turns, folder])]
            started.append(subprocess.Popen(on_host(name, *words), env=env))
        for process in started:
            if process.wait(timeout=400):
                raise RuntimeError("a rank failed")
        found = json.loads((Path(folder) / "rows.json").read_text())
        if keep is not None:
            for when in ("after", "ahead"):
                (keep / f"{when}.trace.json").write_text((Path(folder) / f"{when}.trace.json").read_text())
    rows = []
    for when, steps_of in found.items():
        medians = {key: statistics.median(row[key] for row in steps_of) for key in steps_of[0]}
        each = [row["step_s"] for row in steps_of]
        rows.append(
            {
                "rate_mbit": rate_mbit,
                "delay_ms": delay_ms,
                "pixels": pixels,
                "borders": when,
                **medians,
                "steps_s": each,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", default=None)
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--links", nargs="*", default=["1000:0", "1000:5", "1000:10", "20:0"], help="Mbit/s:ms")
    parser.add_argument("--out", type=Path, default=None, help="A folder for rows and traces.")
    given = parser.parse_args()
    if given.worker is not None:
        worker(*json.loads(given.worker))
        return
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for link in given.links:
        rate, delay = (float(n) for n in link.split(":"))
        try:
            found = measure(rate, delay, given.pixels, given.steps, given.turns, given.out)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:  # it stays in the table
            rows.append({"rate_mbit": rate, "delay_ms": delay, "error": str(error)})
            print(rows[-1], flush=True)
            continue
        rows += found
        for row in found:
            print(
                f"{rate:g} Mbit/s, {delay:g} ms, borders {row['borders']}: step {row['step_s'] * 1e3:.1f} ms, waits "
                f"{row['waits_s'] * 1e3:.1f}, of {row['travel_s'] * 1e3:.1f} ms of messages "
                f"{row['hidden_s'] / max(1e-9, row['travel_s']):.0%} under computing",
                flush=True,
            )
        if given.out is not None:
            (given.out / "overlap.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
