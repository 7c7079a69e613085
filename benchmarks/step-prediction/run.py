"""Step time and peak memory: predicted from calls measured one by one and by estimate, beside a real training step.

    python benchmarks/step-prediction/run.py --out DIRECTORY               (on a GPU if there is one, else on the CPU)
    python benchmarks/step-prediction/run.py --estimate DIRECTORY/FILE.json  (adds `outcore.estimate`; no device)
    python benchmarks/step-prediction/run.py --table DIRECTORY/FILE.json   (the tables of the README)

Per network, batch size and precision: capture, measure, predict; then train in earnest with Adam. Time is the median of
synchronised steps, peak memory what torch's allocator says (on a CPU, the counted bytes of living storages). torch's
MemTracker and RuntimeEstimator look at the same step (`peers.py`). A case that fails stays in the file with its error.

On a GPU a process per network and precision prepares its cases (which takes only the host); when all are ready one case
after the other is timed while nothing else runs: first batches at which the device sets the pace, then, with
`--bound both` or `host`, small ones at which the host does. torch's tools come last.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import networks
import torch
from table import table
from worker import Room, Worker


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['network']} {row['batch']} {row['precision']}: {row['error']}"
    time_error = row["predicted_s"] / row.get("measured_processor_s", row["measured_s"]) - 1
    bytes_error = row["predicted_bytes"] / row["measured_bytes"] - 1
    return (
        f"{row['network']} {row['batch']} {row['precision']}: time {time_error:+.1%} of "
        f"{row['measured_s'] * 1e3:.1f} ms, peak {bytes_error:+.1%}, {row['unmeasured']} unmeasured, "
        f"device for {row['device_s']:.1f} s"
    )


def environment(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "load": None if cuda else os.getloadavg()[0],
    }


class Peers:
    """torch's tools, a process per network; one that dies takes nothing with it."""

    def __init__(self, names: list[str], at_once: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.waiting, self.at_once = list(names), at_once
        self.running: list[subprocess.Popen[bytes]] = []

    def go_on(self) -> bool:
        """Start what may be started; whether anything is left."""
        self.running = [p for p in self.running if p.poll() is None]
        while self.waiting and len(self.running) < self.at_once:
            name = self.waiting.pop(0)
            script = Path(__file__).with_name("peers.py")
            self.running.append(subprocess.Popen([sys.executable, script, name, self.folder / f"{name}.json"]))
        return bool(self.waiting or self.running)

    def stop(self) -> None:
        for process in self.running:
            process.kill()

    def found(self) -> dict[str, dict[str, Any]]:
        """What there is, by network and case."""
        return {path.stem: json.loads(path.read_text()) for path in self.folder.glob("*.json")}


def measure_all(out: Path, device: torch.device, given: argparse.Namespace) -> None:
    """Run the cases, most telling first, and write the result."""
    chosen = networks.GPU if device.type == "cuda" else networks.CPU
    result: dict[str, Any] = {"environment": environment(device)}
    out.mkdir(parents=True, exist_ok=True)
    name = f"{result['environment']['date']}-{device.type}"
    begin, end = time.time(), time.time() + given.limit
    names = [n for n in sorted(chosen, key=lambda n: -_WEIGHT.get(n, 0)) if not given.only or n in given.only]
    peers = Peers([] if given.no_peers else names, 10 if device.type == "cuda" else 1)
    if device.type == "cuda":
        on_a_gpu(names, out, given, end)
    else:
        one_by_one(names, out, given, end)
    seconds = time.time() - begin
    write(out, name, device.type, result | {"seconds": seconds}, {})
    while peers.go_on() and time.time() < end + 60:
        time.sleep(0.2)
    peers.stop()
    print(table(write(out, name, device.type, result | {"seconds": seconds}, peers.found())))
    (out / f"rows-{device.type}.jsonl").unlink()


def on_a_gpu(names: list[str], out: Path, given: argparse.Namespace, end: float) -> None:
    """A process for each network and precision; every round has one batch size of each."""
    room = Room(ROOM_GIB)
    workers = [Worker(n, p, "cuda", room) for n in names for p in ("bf16", "tf32")]
    phases = [("device", [0, 1])] if given.bound != "host" else []
    phases += [("host", [-1])] if given.bound != "device" else []
    pauses: list[float] = []
    for bound, rounds in phases:
        sizes = {w.name: [networks.GPU[w.name].batches[place] for place in rounds] for w in workers}
        for worker in workers:
            for size in sizes[worker.name]:
                worker.ask("prepare", size)
        for worker in workers:
            for _ in rounds:
                worker.answer(end - time.time())
        print(f"{bound}: prepared {end - time.time():.0f} s before the end", flush=True)
        for place in range(len(rounds)):
            for worker in sorted(workers, key=lambda w: _WEIGHT.get(w.name, 0)):
                row = timed(worker, sizes[worker.name][place], given.seconds, end, _middle(pauses))
                pauses += [row["between_s"] / row["beat_s"]] if row.get("beat_s") else []
                note(out, "cuda", row | {"bound": bound})
    for worker in workers:
        worker.close()


def _middle(pauses: list[float]) -> float | None:
    """What lies between calls, in beats of the host: of three processes that measured it, for all that follow."""
    return statistics.median(pauses[:3]) if len(pauses) > 2 else None


def one_by_one(names: list[str], out: Path, given: argparse.Namespace, end: float) -> None:
    """On a CPU preparing takes the device: one case after the other."""
    for name in names:
        worker = Worker(name, "fp32", "cpu", Room(1))
        for size in networks.CPU[name].batches:
            note(out, "cpu", timed(worker, size, given.seconds, end))
        worker.close()


def timed(worker: Worker, size: int, seconds: float, end: float, between: float | None = None) -> dict[str, Any]:
    """The row of a case; one that is not begun in time stays in the result too."""
    row = {"network": worker.name, "batch": size, "precision": worker.precision}
    if time.time() > end:
        return row | {"error": "TimeoutError: not begun in time"}
    worker.ask("run", size, seconds, between)
    return row | worker.answer(end + 60 - time.time())


def note(out: Path, kind: str, row: dict[str, Any]) -> None:
    """Print a row and keep it, in case the run ends early."""
    print(_line(row), flush=True)
    with (out / f"rows-{kind}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def write(
    out: Path, name: str, kind: str, result: dict[str, Any], peers: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Write the dated result and the file of calls from the rows that cases left behind; returns the rows."""
    order = list(networks.GPU if kind == "cuda" else networks.CPU)
    rows = [json.loads(line) for line in (out / f"rows-{kind}.jsonl").read_text().splitlines()]
    rows.sort(key=lambda r: (-r["batch"], r["precision"], order.index(r["network"])))
    for row in rows:
        row |= peers.get(row["network"], {}).get(f"{row['batch']} {row['precision']}", {})
    calls = [
        {k: row.get(k) for k in ("network", "batch", "precision")} | {"calls": row.pop("distinct", [])} for row in rows
    ]
    (out / f"{name}-calls.json.gz").write_bytes(gzip.compress(json.dumps(calls).encode(), mtime=0))
    (out / f"{name}.json").write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    return rows


ROOM_GIB = 96
"""Of the device's memory for those who prepare at the same time; contexts and weights of all take some too."""
_WEIGHT = {"Swin-T": 9, "DenseNet-121": 8, "Inception-v3": 7, "ViT-B": 6, "ConvNeXt-T": 5, "MobileNet-v3": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="directory for the dated JSON")
    parser.add_argument("--table", type=Path, help="print the tables of a result and stop")
    parser.add_argument("--estimate", type=Path, help="add what outcore.estimate says to a result and stop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="most time for measuring the calls of one case")
    parser.add_argument("--limit", type=float, default=270.0, help="begin no case after this many seconds")
    parser.add_argument("--no-peers", action="store_true", help="leave torch's tools out")
    parser.add_argument("--bound", default="device", choices=("device", "host", "both"), help="which cases, on a GPU")
    parser.add_argument("--only", nargs="*", help="names of networks")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.table.read_text())["rows"]))
    elif given.estimate:
        from analytic import add_estimates

        add_estimates(given.estimate, given.only)
    elif given.out is None:
        parser.error("say where to write: --out benchmarks/step-prediction/results")
    else:
        measure_all(given.out, torch.device(given.device), given)


if __name__ == "__main__":
    main()
