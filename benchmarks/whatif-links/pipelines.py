"""Pipelines and GEMS over real links, predicted and measured; needs root, takes three minutes.

    python benchmarks/whatif-links/pipelines.py [LINK ...] [--out FOLDER]      links by number; all if none is given

The networks, links and hosts are those of `run.py`. Two hosts of one core hold a stage each (under GEMS each also holds
the other's, inverted), and train by the plan that `outcore.plan` makes for the schedule, in turn with plain steps of
the same batch by every rank for itself. Plan and prediction are those of the public call, made in two processes at
once: `outcore.plan(job, machine=..., measure_s=...)` knows the calls of the network, measured there with the batch and
with a part of it, and exchanges of five sizes over the link; nothing of the training over it. Rows have the form of
`run.py`'s.
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
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from hosts import address, hosts, on_host, unavailable
from networks import NETWORKS
from run import helps, show, summary

import outcore
from outcore.machine import Machine, known, rated
from outcore.machine.link import Link
from outcore.run import Engine, launch, measure_link

HERE = Path(__file__).parent
RANKS, BATCH = 2, 32
LINKS = [(10_000, 0.0), (1000, 0.0), (100, 0.0), (1000, 10.0), (100, 10.0)]
SCHEDULES = ("1f1b", "gems")
ROUNDS, SKIPPED = 9, 2
MEASURE_S = 6.0
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Large tensors are not given back to the system in every step; the same where calls are measured and where they are
trained with."""


def on_own_core() -> None:
    """Keep this rank, and all threads that it starts, on the core of its host.

    Hosts share this machine's cores: without, a rank that a message wakes is put on the core of the one that sent it,
    and both compute on one for some milliseconds.
    """
    cores = sorted(os.sched_getaffinity(0))
    rank = next(int(os.environ[name]) for name in ("OMPI_COMM_WORLD_RANK", "RANK") if name in os.environ)
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)


def planned(machine: Machine) -> list[dict[str, Any]]:
    """In one of as many processes as there are ranks, at the same time: the plan of every network and schedule, and the
    step that it predicts; none where it is no pipeline."""
    on_own_core()
    rows = []
    for network, job in NETWORKS.items():
        for schedule in SCHEDULES:
            made = outcore.plan(
                job, devices=RANKS, machine=machine, batch=BATCH, schedule=schedule, measure_s=MEASURE_S
            )
            if len(made.stages) < RANKS:
                print(f"{network}, {schedule}: {made.arrangement} is no pipeline", flush=True)
                continue
            assert made.predicted is not None
            found = {"plan": made.to_json(), "arrangement": made.arrangement, "predicted_s": made.predicted.time_s}
            rows.append({"network": network, "strategy": schedule} | found)
    return rows


def link_worker(out: str) -> None:
    """One of two ranks: what exchanges between them take."""
    on_own_core()
    found = measure_link()
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        Path(out).write_text(json.dumps(asdict(found)))


def worker(document: str, out: str) -> None:
    """One rank: trains by every plan, in turn with plain steps of the same batch, and writes seconds of a step."""
    on_own_core()
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
            **ALLOCATOR,
        }  # fmt: skip
        started.append(subprocess.Popen(on_host(name, sys.executable, __file__, *words), env=env))
    try:
        if any(process.wait(timeout=200) for process in started):
            raise RuntimeError("a rank failed")
    finally:
        for process in started:
            process.kill()


def measured(rate: int, delay: float) -> list[dict[str, Any]]:
    """Rows of one link."""
    name = f"{rate} Mbit/s" + (f", {2 * delay:g} ms there and back" if delay else "")
    with hosts(RANKS, rate, delay, prefix="stages") as names, tempfile.TemporaryDirectory() as folder:
        out, document = Path(folder) / "found.json", Path(folder) / "rows.json"
        on_hosts(names, "--link", str(out))
        wire = json.loads(out.read_text())
        one = known()
        machine = replace(one, devices=(rated(one.device("cpu")),) * RANKS, between_devices=Link(**wire))
        rows = [{"ranks": RANKS, "link": name, "wire": wire} | row for row in launch(planned, RANKS, machine)[0]]
        document.write_text(json.dumps(rows))
        on_hosts(names, "--worker", str(document), str(out))
        rows = json.loads(out.read_text())
    for row in rows:
        row["alone_s"], row["measured_s"] = (statistics.median(row[f"{n}_all_s"]) for n in ("alone", "measured"))
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
        row["predicted_helps"] = helps(RANKS, row["alone_s"], row["predicted_s"], row["strategy"])
        row["measured_helps"] = helps(RANKS, row["alone_s"], row["measured_s"])
        show(row)
    return rows


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
    os.environ |= ALLOCATOR  # of the processes that this one starts
    rows: list[dict[str, Any]] = []
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{datetime.date.today()}-pipelines.json"
    if given.links and path.exists():  # the others are there
        rows = json.loads(path.read_text())["rows"]
    for number in given.links or range(len(LINKS)):
        try:
            rows += measured(*LINKS[number])
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # the other links are still worth having
            print(f"{LINKS[number]}: {error}", flush=True)
        path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    summary(rows)


if __name__ == "__main__":
    main()
