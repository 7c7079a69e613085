"""Pipelines and GEMS over real links, predicted and measured; needs root, takes three minutes.

    python benchmarks/whatif-links/pipelines.py [LINK ...] [--out FOLDER]      links by number; all if none is given

The networks, links and hosts are those of `run.py`. Two hosts of one core hold a stage each (under GEMS each also holds
the other's, inverted), and train by the plan that `outcore.plan` makes for the schedule, in turn with plain steps of
the same batch by every rank for itself. The prediction knows the calls of the network, measured in two processes at
once with the batch and with an eighth of it, and exchanges of five sizes over the link; nothing of the training over
it. Rows have the form of `run.py`'s.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unet-grid"))

import torch
from hosts import address, hosts, on_host, unavailable
from networks import NETWORKS
from run import helps, show, summary

import outcore
from outcore.cost.costs import Costs
from outcore.cost.measured.fixed_times import with_fixed_times
from outcore.cost.measured.measure import measure
from outcore.machine import known
from outcore.machine.link import Link
from outcore.planner.pipeline.loss_and_update import LossAndUpdate
from outcore.planner.pipeline.lower import predict_timeline
from outcore.planner.pipeline.plan_job import links_of, weights_on
from outcore.run import Engine, launch

HERE = Path(__file__).parent
RANKS, BATCH, PART = 2, 32, 4
LINKS = [(10_000, 0.0), (1000, 0.0), (100, 0.0), (1000, 10.0), (100, 10.0)]
SCHEDULES = ("1f1b", "gems")
ROUNDS, SKIPPED = 9, 2
MEASURE_S = 6.0


def measured_calls(network: str) -> dict[str, Any]:
    """In one of as many processes as there are ranks, at the same time: what the calls of a network take, with the
    whole batch and with a micro-batch."""
    torch.set_num_threads(1)
    whole, part = (measure(NETWORKS[network].capture(size), "cpu", time_limit_s=MEASURE_S) for size in (BATCH, PART))
    return with_fixed_times(whole, part, PART / BATCH).to_json()


def link_worker(out: str) -> None:
    """One of two ranks: what exchanges between them take."""
    from times import job, measure_link

    graph = job("chain", False, 0.25).capture(1)
    plan = outcore.Plan(graph.fingerprint, (("",),), spatial={"grid": [1, 2]}, exactness="reassociated")
    found = measure_link(plan.to_json(), "chain", False, 0.25)
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        Path(out).write_text(json.dumps(found))


def worker(document: str, out: str) -> None:
    """One rank: trains by every plan, in turn with plain steps of the same batch, and writes seconds of a step."""
    torch.set_num_threads(1)
    rows = json.loads(Path(document).read_text())
    for row in rows:
        job = NETWORKS[row["network"]]
        inputs, targets = job.batch(BATCH)
        assert job.optimizer is not None
        alone = plain_step(row["network"])
        with Engine(job, outcore.Plan.from_json(row["plan"]), optimizer=job.optimizer, device="cpu") as engine:
            times: dict[str, list[float]] = {"alone_all_s": [], "measured_all_s": []}
            together = partial(engine.step, inputs, targets)
            for _ in range(ROUNDS + SKIPPED):
                for name, step in (("alone_all_s", alone), ("measured_all_s", together)):
                    engine.world.barrier()
                    began = time.perf_counter()
                    step()
                    times[name].append(round(time.perf_counter() - began, 5))
            rank = engine.rank
        row |= {name: took[SKIPPED:] for name, took in times.items()}
        if rank == 0:
            Path(out).write_text(json.dumps(rows))


def plain_step(network: str) -> Callable[[], None]:
    """A step of the whole batch in plain PyTorch."""
    job = NETWORKS[network]
    model = job.build().train()
    (x,), _, target = job.example()
    assert job.optimizer is not None and job.loss is not None
    loss, optimizer = job.loss, job.optimizer(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), target).backward()
        optimizer.step()

    return step


def on_hosts(names: list[str], *words: str) -> None:
    """Run this script with some words on every host."""
    started = []
    for rank, name in enumerate(names):
        env = {
            **os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(len(names)),
            "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": address(0), "MASTER_PORT": "29583",
            "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "OUTCORE_SECRET": "0123456789abcdef" * 4,
            "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        }  # fmt: skip
        started.append(subprocess.Popen(on_host(name, sys.executable, __file__, *words), env=env))
    try:
        if any(process.wait(timeout=200) for process in started):
            raise RuntimeError("a rank failed")
    finally:
        for process in started:
            process.kill()


def measured(rate: int, delay: float, costs: dict[str, Costs]) -> list[dict[str, Any]]:
    """Rows of one link."""
    name = f"{rate} Mbit/s" + (f", {2 * delay:g} ms there and back" if delay else "")
    with hosts(RANKS, rate, delay) as names, tempfile.TemporaryDirectory() as folder:
        out, document = Path(folder) / "found.json", Path(folder) / "rows.json"
        on_hosts(names, "--link", str(out))
        wire = json.loads(out.read_text())
        link = Link.symmetric(
            bandwidth_bytes_per_s=wire["bytes_per_s"], latency_s=wire["latency_s"], host_s=wire["host_s"]
        )
        one = known()
        machine = replace(one, devices=(one.device("cpu"),) * RANKS, between_devices=link)
        rows = [
            {"ranks": RANKS, "link": name, "network": network, "strategy": schedule, "wire": wire} | found
            for network in NETWORKS
            for schedule in SCHEDULES
            if (found := predicted(network, schedule, machine, costs[network])) is not None
        ]
        document.write_text(json.dumps(rows))
        on_hosts(names, "--worker", str(document), str(out))
        rows = json.loads(out.read_text())
    for row in rows:
        row["alone_s"], row["measured_s"] = (statistics.median(row[f"{n}_all_s"]) for n in ("alone", "measured"))
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
        row["predicted_helps"] = helps(RANKS, row["alone_s"], row["predicted_s"])
        row["measured_helps"] = helps(RANKS, row["alone_s"], row["measured_s"])
        show(row)
    return rows


def predicted(network: str, schedule: Any, machine: Any, costs: Costs) -> dict[str, Any] | None:
    """The plan of a schedule with two stages, and its step; none where there is none."""
    job = NETWORKS[network]
    graph = job.capture(BATCH)
    weights = weights_on(machine, graph, costs, LossAndUpdate.of(job, graph, costs, machine, BATCH))
    made = outcore.plan(graph, devices=RANKS, machine=machine, schedule=schedule, costs=costs)
    if len(made.stages) < RANKS:
        print(f"{network}, {schedule}: {made.arrangement} is no pipeline", flush=True)
        return None
    step_s = predict_timeline(made, graph, weights, links_of(machine)).step_s
    return {"plan": made.to_json(), "arrangement": made.arrangement, "predicted_s": step_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("links", type=int, nargs="*")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--link", help="what one of two ranks measures is written there")
    parser.add_argument("--worker", nargs=2, help="the plans that a rank trains by, and where it writes")
    given = parser.parse_args()
    if given.link is not None:
        link_worker(given.link)
        return
    if given.worker is not None:
        worker(*given.worker)
        return
    if (why := unavailable()) is not None:
        raise SystemExit(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that no namespace is left behind
    costs = {name: Costs.from_json(launch(measured_calls, RANKS, name)[0]) for name in NETWORKS}
    rows: list[dict[str, Any]] = []
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{datetime.date.today()}-pipelines.json"
    if given.links and path.exists():  # the others are there
        rows = json.loads(path.read_text())["rows"]
    for number in given.links or range(len(LINKS)):
        try:
            rows += measured(*LINKS[number], costs)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # the other links are still worth having
            print(f"{LINKS[number]}: {error}", flush=True)
        path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    summary(rows)


if __name__ == "__main__":
    main()
