"""Step time and peak memory: predicted from calls measured one by one and by estimate, beside a real training step.

    python benchmarks/step-prediction/run.py --out DIRECTORY               (on a GPU if there is one, else on the CPU)
    python benchmarks/step-prediction/run.py --estimate DIRECTORY/FILE.json  (adds `outcore.estimate`; no device)
    python benchmarks/step-prediction/run.py --table DIRECTORY/FILE.json   (the tables of the README)

Per network, batch size and precision: capture, measure, predict; then train in earnest with Adam. Time is the median of
synchronised steps, peak memory what torch's allocator says (on a CPU, the counted bytes of living storages). torch's
MemTracker and RuntimeEstimator look at the same step (`peers.py`). A case that fails stays in the file with its error.

On a GPU a process per network prepares its cases (which takes only the host); when all are ready one case after the
other is timed while nothing else runs. torch's tools come last.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import networks
import torch
from case import Case, clean
from table import table

_lock: Any = None
_ready: Any = None


def prepare(lock: Any, ready: Any) -> None:
    """Settings of a process."""
    global _lock, _ready
    _lock, _ready = lock, ready
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def one_network(
    name: str, which: list[tuple[int, str]], kind: str, seconds: float, end: float, out: Path
) -> list[dict[str, Any]]:
    """All cases of a network: prepared together where processes share a device, else one by one."""
    device, rows = torch.device(kind), []
    network = (networks.GPU if kind == "cuda" else networks.CPU)[name]
    cases: list[Case | Exception] = []
    if kind == "cuda":
        cases = [_prepared(network, size, precision, device) for size, precision in which]
        _ready.wait(timeout=max(1.0, end - time.time()))
    for place, (size, precision) in enumerate(which):
        row: dict[str, Any] = {"network": name, "batch": size, "precision": precision}
        rows.append(row)
        with _lock:
            try:
                if time.time() > end:
                    raise TimeoutError("not begun in time")
                case = cases[place] if cases else _prepared(network, size, precision, device)
                if isinstance(case, Exception):
                    raise case
                figures, row["distinct"] = case.run(seconds)
                row |= figures
                print(_line(row), flush=True)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
                traceback.print_exc(limit=-2)
            if cases:
                cases[place] = TimeoutError()
            case = None  # type: ignore[assignment]
            clean(device)
            with (out / f"rows-{kind}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    return rows


def _prepared(network: networks.Network, size: int, precision: str, device: torch.device) -> Case | Exception:
    try:
        return Case(network, size, precision == "bf16", device)
    except Exception as error:
        return error


def _line(row: dict[str, Any]) -> str:
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


def measure_all(
    out: Path, device: torch.device, seconds: float, limit: float, only: list[str] | None, *, others: bool
) -> None:
    chosen = networks.GPU if device.type == "cuda" else networks.CPU
    precisions = ("bf16", "tf32") if device.type == "cuda" else ("fp32",)
    result: dict[str, Any] = {"environment": environment(device)}
    out.mkdir(parents=True, exist_ok=True)
    name = f"{result['environment']['date']}-{device.type}"
    begin, end = time.time(), time.time() + limit
    # Those that take longest to prepare come first.
    names = [n for n in sorted(chosen, key=lambda n: -_WEIGHT.get(n, 0)) if not only or n in only]
    peers = Peers(names if others else [], 10 if device.type == "cuda" else 1)
    spawn = multiprocessing.get_context("spawn")
    workers = len(names) if device.type == "cuda" else 1
    shared = (spawn.Lock(), spawn.Barrier(workers))
    with ProcessPoolExecutor(workers, spawn, prepare, shared) as pool:
        tasks = []
        for n in names:
            cases = [(s, p) for s in reversed(chosen[n].sizes) for p in precisions]
            tasks.append(pool.submit(one_network, n, cases, device.type, seconds, end, out))
        for task in tasks:
            task.result()
    seconds = time.time() - begin
    write(out, name, device.type, result | {"seconds": seconds}, {})
    while peers.go_on() and time.time() < end + 60:
        time.sleep(0.2)
    peers.stop()
    print(table(write(out, name, device.type, result | {"seconds": seconds}, peers.found())))
    (out / f"rows-{device.type}.jsonl").unlink()


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
        measure_all(
            given.out, torch.device(given.device), given.seconds, given.limit, given.only, others=not given.no_peers
        )


if __name__ == "__main__":
    main()
