"""Trains over real links and predicts the same; needs root, takes five minutes.

    python benchmarks/whatif-links/run.py [LINK ...] [--out FOLDER]      links by their number; all if none is given
    python benchmarks/whatif-links/run.py again [FILE]                   predicts the cases of a result once more


For every link DDP and FSDP2 are trained by one process per host, each a network namespace, in turn with the same
network alone (as many processes, which do not speak) and with probes: the three collectives in four sizes. The
prediction knows the step alone, the probes of the same rounds, and the recorded step; nothing of the training over the
link. A host has one core: a rank's own work and its collectives share it. Where the machine has fewer cores than there
are ranks, they share those.

Ranks keep the memory that they free. By default glibc gives a buffer of some MiB back at once, and every page of the
next is made anew, which took 9 ms for 16 MiB on this machine, six times as long as copying them; frameworks that train
on CPUs load an allocator that keeps it (jemalloc, tcmalloc).
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from hosts import hosts, unavailable
from networks import NETWORKS
from probed_link import ProbedLink
from worker import SIZES

from outcore.machine import Device
from outcore.machine.probe_cpu import cpu_memory_bytes, cpu_name, measure_copy, measure_dispatch, measure_matmul
from outcore.whatif import scaling_table
from outcore.whatif.anchor import Anchor
from outcore.whatif.data_parallel import data_parallel, sharded
from outcore.whatif.recording import SetupRecording, record_setup
from outcore.whatif.setup import TrainingSetup

HERE = Path(__file__).parent
LINKS = [
    (2, 10_000, 0.0),
    (2, 1000, 0.0),
    (2, 100, 0.0),
    (3, 1000, 0.0),
    (3, 100, 0.0),
    (2, 1000, 10.0),
    (2, 100, 10.0),
]
ROUNDS = (int(os.environ.get("ROUNDS", "9")), 5)
"""Of a fast and of a slow link."""
SAID = {True: "yes", False: "no", None: "too close"}
CASES = [(network, strategy) for network in NETWORKS for strategy in ("data_parallel", "sharded")]


def trained(names: list[str], steps: int) -> dict[str, Any]:
    """What the first rank reports."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        started = []
        for rank, name in enumerate(names):
            env = {
                **os.environ, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "RANK": str(rank),
                "WORLD_SIZE": str(len(names)), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
                "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
            }  # fmt: skip
            words = [sys.executable, str(HERE / "worker.py"), str(out), str(steps)]
            started.append(subprocess.Popen(["ip", "netns", "exec", name, *words], env=env, stderr=subprocess.DEVNULL))
        try:
            for process in started:
                if process.wait(timeout=200):
                    raise RuntimeError("a rank failed")
        finally:
            for process in started:
                process.kill()
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def link_of(probe: dict[str, list[list[float]]], ranks: int, name: str, cores: int) -> ProbedLink:
    """The link as its probes have it."""
    points = {kind: tuple((size, s, core) for size, s, core in found) for kind, found in probe.items()}
    return ProbedLink.of(name, points, ranks / cores)


def probes_of(found: dict[str, Any]) -> dict[str, list[list[float]]]:
    return {
        kind: [[size, (p := found[f"{kind} {size}"])["step_s"], p["core_s"]] for size in SIZES]
        for kind in ("all_reduce", "gather", "scatter")
    }


def predicted(recording: SetupRecording, strategy: str, ranks: int, alone_s: float, link: ProbedLink) -> float:
    """A rank's step over the link, from its step alone."""
    weave = data_parallel if strategy == "data_parallel" else sharded
    step = Anchor.of(recording.step, alone_s).apply(recording.step)
    return weave(step, recording, ranks, link).simulate().step_s


def predict_again(path: Path, recordings: dict[str, SetupRecording]) -> None:
    """Predict the cases of a result once more, from the same measurements."""
    document = json.loads(path.read_text())
    for row in document["rows"]:
        link = link_of(row["probe"], row["ranks"], row["link"], row["cores"])
        row["predicted_s"] = predicted(recordings[row["network"]], row["strategy"], row["ranks"], row["alone_s"], link)
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
        row["predicted_helps"] = helps(row["ranks"], row["ranks"] * row["alone_s"], row["predicted_s"], row["strategy"])
        row["measured_helps"] = helps(row["ranks"], row["ranks"] * row["alone_s"], row["measured_s"])
        show(row)
    path.write_text(json.dumps(document, indent=1) + "\n")
    summary(document["rows"])


def helps(ranks: int, alone_s: float, together_s: float, strategy: str | None = None) -> bool | None:
    """Whether ranks bring more samples a second than one of them, as `outcore whatif` says it: by a measured step, or
    by the interval of a step that is predicted for a strategy; None where that is too close to say. Both times are of
    the samples that all ranks take in a step."""
    low, high = scaling_table.SHARES[strategy] if strategy is not None else (1.0, 1.0)
    return scaling_table.helps(ranks, alone_s / (together_s * high), alone_s / (together_s * low))


def show(row: dict[str, Any]) -> None:
    print(
        f"| {row['ranks']} | {row['link']} | {row['network']} | {row['strategy']} | {row['alone_s'] * 1e3:.0f} ms | "
        f"{row['predicted_s'] * 1e3:.0f} ms | {row['measured_s'] * 1e3:.0f} ms | {row['error']:+.1%} | "
        f"{SAID[row['predicted_helps']]} | {SAID[row['measured_helps']]} |",
        flush=True,
    )


def summary(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    errors = sorted(abs(row["error"]) for row in rows)
    right = sum(row["predicted_helps"] == row["measured_helps"] for row in rows)
    unsaid = sum(row["predicted_helps"] is None for row in rows)
    median = statistics.median(errors)
    print(
        f"{len(rows)} cases, median error {median:.1%}, worst {errors[-1]:.1%}, "
        f"verdict right in {right}, too close to say in {unsaid}"
    )


def one_core() -> Device:
    """A core of this machine, measured."""
    torch.set_num_threads(1)
    rates = {"fp32": measure_matmul("fp32") or 1e11}
    name = f"one core of {cpu_name()}"
    return Device(name, "cpu", cpu_memory_bytes(), measure_copy(), rates, dispatch_s=measure_dispatch())


def main() -> None:
    words = sys.argv[1:]
    folder = Path(words.pop(words.index("--out") + 1)) if "--out" in words else HERE / "results"
    words = [word for word in words if word != "--out"]
    if (why := unavailable()) is not None and "again" not in words:
        raise SystemExit(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that no namespace is left behind
    device = one_core()
    recordings = {name: record_setup(TrainingSetup(job), device) for name, job in NETWORKS.items()}
    rows: list[dict[str, Any]] = []
    path = folder / f"{datetime.date.today()}.json"
    if "again" in words:
        predict_again(Path(words[1]) if len(words) > 1 else path, recordings)
        return
    if words and path.exists():
        rows = json.loads(path.read_text())["rows"]
    for number in [int(n) for n in words] or range(len(LINKS)):
        try:
            rows += measured(*LINKS[number], recordings)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # the other links are still worth having
            print(f"{LINKS[number]}: {error}", flush=True)
        path.write_text(json.dumps({"device": device.name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    summary(rows)


def measured(count: int, rate: int, delay: float, recordings: dict[str, SetupRecording]) -> list[dict[str, Any]]:
    """Rows of one link."""
    rows: list[dict[str, Any]] = []
    name = f"{rate} Mbit/s" + (f", {2 * delay:g} ms there and back" if delay else "")
    with hosts(count, rate, delay) as names:
        every = trained(names, ROUNDS[0] if rate >= 1000 else ROUNDS[1])
    for network, strategy in CASES:
        found = every[network]
        probe = probes_of(found)
        alone, real = found["alone"], found[strategy]
        link = link_of(probe, count, name, every["cores"])
        predicted_s = predicted(recordings[network], strategy, count, alone["step_s"], link)
        rows.append(
            {
                "ranks": count, "link": name, "network": network, "strategy": strategy, "cores": every["cores"],
                "alone_s": alone["step_s"], "predicted_s": predicted_s, "measured_s": real["step_s"],
                "error": predicted_s / real["step_s"] - 1,
                "predicted_helps": helps(count, count * alone["step_s"], predicted_s, strategy),
                "measured_helps": helps(count, count * alone["step_s"], real["step_s"]), "probe": probe,
                "alone_all_s": alone["all_s"], "measured_all_s": real["all_s"],
                "alone_core_s": alone["core_s"], "measured_core_s": real["core_s"],
            }
        )  # fmt: skip
        show(rows[-1])
    return rows


if __name__ == "__main__":
    main()
