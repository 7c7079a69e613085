"""Step time and peak memory: predicted from calls measured one by one and by estimate, beside a real training step.

    python benchmarks/step-prediction/run.py --out DIRECTORY               (on a GPU if there is one, else on the CPU)
    python benchmarks/step-prediction/run.py --estimate DIRECTORY/FILE.json  (adds `outcore.estimate`; no device)
    python benchmarks/step-prediction/run.py --gather DIRECTORY/FILE.json FOLDER ...  (adds what was left in folders)
    python benchmarks/step-prediction/run.py --table DIRECTORY/FILE.json   (the tables of the README)

Per network, batch size and precision: capture, measure, predict; then train in earnest with Adam. Time is the median of
synchronised steps, peak memory what torch's allocator says (on a CPU, the counted bytes of living storages). torch's
MemTracker and RuntimeEstimator look at the same step (`peers.py`). A case that fails stays in the file with its error.

On a GPU a process per network and precision prepares its cases (which takes only the host); when all are ready one case
after the other is timed while nothing else runs: first batches at which the device sets the pace, then, with
`--bound both` or `host`, small ones at which the host does. torch's tools come last. A case is kept as soon as it is
timed: `--gather` makes the result of a run that was cut off, and adds cases and answers of torch's tools from others.
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


def measure_all(out: Path, device: torch.device, given: argparse.Namespace) -> None:
    """Run the cases, most telling first, and write the result."""
    chosen = networks.GPU if device.type == "cuda" else networks.CPU
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{datetime.date.today().isoformat()}-{device.type}.json"
    path.write_text(json.dumps({"environment": environment(device), "rows": []}))
    begin, end = time.time(), time.time() + given.limit
    names = [n for n in sorted(chosen, key=lambda n: -_WEIGHT.get(n, 0)) if not given.only or n in given.only]
    peers = Peers([] if given.no_peers else names, 10 if device.type == "cuda" else 1)
    if device.type == "cuda":
        on_a_gpu(names, out, given, end)
    else:
        one_by_one(names, out, given, end)
    gather(path, [out], seconds=time.time() - begin)
    (out / ROWS).unlink()
    while peers.go_on() and time.time() < end + 60:
        time.sleep(0.2)
    peers.stop()
    print(table(gather(path, [peers.folder])))


def on_a_gpu(names: list[str], out: Path, given: argparse.Namespace, end: float) -> None:
    """A process for each network and precision; every round has one batch size of each."""
    room = Room(ROOM_GIB)
    workers = [Worker(n, p, "cuda", room) for n in names for p in ("bf16", "tf32")]
    phases = [("device", given.places or [0, 1])] if given.bound != "host" else []
    phases += [("host", [2])] if given.bound != "device" else []
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
                note(out, row | {"bound": bound})
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
            note(out, timed(worker, size, given.seconds, end))
        worker.close()


def timed(worker: Worker, size: int, seconds: float, end: float, between: float | None = None) -> dict[str, Any]:
    """The row of a case; one that is not begun in time stays in the result too."""
    row = {"network": worker.name, "batch": size, "precision": worker.precision}
    if time.time() > end:
        return row | {"error": "TimeoutError: not begun in time"}
    worker.ask("run", size, seconds, between)
    return row | worker.answer(end + 60 - time.time())


def note(out: Path, row: dict[str, Any]) -> None:
    """Print a row and keep it, in case the run ends early."""
    print(_line(row), flush=True)
    with (out / ROWS).open("a") as file:
        file.write(json.dumps(row) + "\n")


def gather(path: Path, folders: list[Path], **about: Any) -> list[dict[str, Any]]:
    """Add the rows and the answers of torch's tools that lie in folders to a result and its file of calls."""
    result = json.loads(path.read_text()) | about
    calls_path = path.with_name(f"{path.stem}-calls.json.gz")
    known = json.loads(gzip.decompress(calls_path.read_bytes())) if calls_path.exists() else []
    rows = {_case(row): row for row in result["rows"]}
    calls = {_case(line): line for line in known}
    for folder in folders:
        for row in _rows(folder / ROWS):
            if "error" in rows.get(_case(row), {"error": ""}) or "error" not in row:
                calls[_case(row)] = dict(zip(CASE, _case(row), strict=True)) | {"calls": row.pop("distinct", [])}
                before = rows.get(_case(row), {})  # torch's tools may have answered already
                rows[_case(row)] = {k: v for k, v in before.items() if k != "error"} | row
        for key, row in rows.items():
            said = folder / f"{key[0]}.json"
            row |= json.loads(said.read_text()).get(f"{key[1]} {key[2]}", {}) if said.exists() else {}
    order = list(networks.GPU | networks.CPU)
    result["rows"] = sorted(rows.values(), key=lambda r: (order.index(r["network"]), r["batch"], r["precision"]))
    kept = sorted(calls.values(), key=lambda line: (order.index(line["network"]), line["batch"], line["precision"]))
    calls_path.write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))
    path.write_text(json.dumps(result, indent=1) + "\n")
    return list(result["rows"])


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in CASE)


CASE = ("network", "batch", "precision")
ROWS = "rows.jsonl"
"""Where a run keeps its cases until it ends."""
ROOM_GIB = 96
"""Of the device's memory for those who prepare at the same time; contexts and weights of all take some too."""
_WEIGHT = {"Swin-T": 9, "DenseNet-121": 8, "Inception-v3": 7, "ViT-B": 6, "ConvNeXt-T": 5, "MobileNet-v3": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="directory for the dated JSON")
    parser.add_argument("--table", type=Path, help="print the tables of a result and stop")
    parser.add_argument("--estimate", type=Path, help="add what outcore.estimate says to a result and stop")
    parser.add_argument("--gather", type=Path, help="add what lies in folders to a result and stop")
    parser.add_argument("folders", type=Path, nargs="*", help="of --gather: where runs and torch's tools wrote")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="most time for measuring the calls of one case")
    parser.add_argument("--limit", type=float, default=270.0, help="begin no case after this many seconds")
    parser.add_argument("--no-peers", action="store_true", help="leave torch's tools out")
    parser.add_argument("--bound", default="device", choices=("device", "host", "both"), help="which cases, on a GPU")
    parser.add_argument("--only", nargs="*", help="names of networks")
    parser.add_argument("--places", type=int, nargs="*", help="which of a network's batch sizes, counted from 0")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.table.read_text())["rows"]))
    elif given.estimate:
        from analytic import add_estimates

        add_estimates(given.estimate, given.only)
    elif given.gather:
        print(table(gather(given.gather, given.folders)))
    elif given.out is None:
        parser.error("say where to write: --out benchmarks/step-prediction/results")
    else:
        measure_all(given.out, torch.device(given.device), given)


if __name__ == "__main__":
    main()
