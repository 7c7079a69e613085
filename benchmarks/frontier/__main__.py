"""Measure the frontier.

    python -m benchmarks.frontier --out DIR [--networks resnet50,gpt] [--sizes large,batch] [--precisions bf16,tf32]
        [--tiers a,b,c] [--ways 'ours 1/2'] [--seconds 570] [--processes 6] [--resume FILE ...] [--device cpu]

Rows are appended to DIR/rows.jsonl as they come; rows that are there with the same fingerprint (or in a file that is
given with --resume) are not measured again. With `--device cpu` sizes are tiny, memory is live bytes, and nothing is
claimed: it shows that the script runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.frontier.networks import NETWORKS
from benchmarks.frontier.row import Settings, measured_in_a_process
from benchmarks.frontier.training import Case
from benchmarks.frontier.turns import Asked, run_all
from benchmarks.frontier.ways import Ready, Rows, Way, ways

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU must not open it before a fork
}
"""Of all processes, unless it says otherwise."""
PRELOAD = ("benchmarks.frontier.preload",)


SOURCES = [Path(__file__).parent / f"{name}.py" for name in ("networks", "peers", "offload_peer", "training", "row")]
"""What every row depends on."""


def digest(paths: Iterable[Path]) -> str:
    """Of sources."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


class Table:
    """The rows that are there, and those to come."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        given.out.mkdir(parents=True, exist_ok=True)
        self.path: Path = given.out / "rows.jsonl"
        device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        peers = f"{torch.__version__} {device} {digest(SOURCES)}"
        self.fingerprints = {False: peers, True: f"{peers} {digest((ROOT / 'src' / 'outcore').rglob('*.py'))}"}
        self.cases = [
            Case(name, size, precision == "bf16")
            for size in (given.sizes.split(",") if given.device == "cuda" else ["tiny"])
            for name in given.networks.split(",")
            for precision in given.precisions.split(",")
        ]
        self.rows: dict[Case, Rows] = {case: {} for case in self.cases}
        self.begun: set[tuple[Case, str]] = set()
        for path in (*given.resume, self.path):
            self._read(path)
        self._append({"header": self._header(device)})

    def _header(self, device: str) -> dict[str, Any]:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda}
        return {
            "commit": commit or os.environ.get("OUTCORE_COMMIT", "unknown"),
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "device": device,
            "python": platform.python_version(),
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "arguments": [word for word in sys.argv[1:] if not Path(word).is_absolute()],
            "fingerprint": self.fingerprints[True],
            **versions,
        }

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        by_label = {case.label: case for case in self.cases}
        for line in path.read_text().splitlines():
            row = json.loads(line)
            case = by_label.get(row.get("case", ""))
            if case and row["fingerprint"] == self.fingerprints[row["way"].startswith("ours")]:
                self.rows[case][row["way"]] = row

    def _append(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _add(self, case: Case, way: Way, ready: Ready, row: dict[str, Any]) -> None:
        facts = {"case": case.label, "network": case.name, "size": case.size, "shape": case.shape, "way": way.name}
        facts |= {"precision": "bf16" if case.bf16 else "tf32", "channels_last": ready.channels_last}
        row = facts | row | {"fingerprint": self.fingerprints[way.name.startswith("ours")]}
        self.rows[case][way.name] = row
        self._append(row)
        print(shown(row, self.rows[case]), flush=True)

    def _missing(self) -> Iterator[tuple[Case, Way]]:
        wanted = [w for tier in self.given.tiers.split(",") for w in ways(tier)]
        if self.given.ways:
            wanted = [w for w in wanted if w.name in self.given.ways or not w.needs]
        for tier in self.given.tiers.split(","):
            for case in self.cases:
                for way in wanted:
                    if way.tier == tier and way.name not in self.rows[case] and (case, way.name) not in self.begun:
                        yield case, way

    def next(self) -> Asked | None:
        """The first row that can begin."""
        for case, way in list(self._missing()):
            ready = way.ready(self.rows[case], case.network.has_layouts)
            if ready is None:
                continue
            if isinstance(ready, str):
                self.rows[case][way.name] = {"skipped": ready}
                continue
            self.begun.add((case, way.name))
            settings = Settings(self.given.device, self.given.steps, folder=self.given.out)
            args = (case, way.run, ready.channels_last, ready.budget, settings)
            return Asked(
                measured_in_a_process,
                args,
                lambda row, case=case, way=way, ready=ready: self._add(case, way, ready, row),  # type: ignore[misc]
                f"{case.label} {way.name}",
            )
        return None


def shown(row: dict[str, Any], rows: Rows) -> str:
    """A row in one line."""
    from benchmarks.frontier.ways import fastest_plain, peak_of

    name = f"{row['case']:28s} {row['way']:28s}"
    if "ms" not in row:
        return f"{name} {row.get('error', '')[:160]} ({row.get('all_s')} s)"
    plain = fastest_plain(rows)
    ratio = f"{row['ms'] / plain['ms']:.2f}x at {peak_of(row) / peak_of(plain):.2f}" if plain else ""
    within = f", {peak_of(row) / row['budget']:.2f} of its budget" if row.get("budget") else ""
    equal = f", {row.get('bitwise', '?')}/{row.get('gradients', '?')} equal (plain {row.get('plain_repeats')})"
    worst = f", {row['largest_difference']:.0e}" if row.get("largest_difference") else ""
    planning = f", planned in {row['planning_s']} s" if "planning_s" in row else ""
    graphs = " as graphs" if row.get("as_graphs") else ""
    return (
        f"{name} {row['ms']:8.1f} ms ({row['quarter_ms']:.1f} to {row['three_quarters_ms']:.1f}, {row['steps']} steps) "
        f"{peak_of(row) / 2**30:6.2f} GiB {ratio}{within}{equal}{worst}{planning}{graphs} ({row['all_s']} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--sizes", default="large,batch")
    parser.add_argument("--precisions", default="bf16,tf32")
    parser.add_argument("--tiers", default="a,b,c")
    parser.add_argument("--ways", nargs="*", default=[])
    parser.add_argument("--resume", nargs="*", type=Path, default=[])
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--limit", type=float, default=150, help="seconds of work for a row")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    until = time.monotonic() + given.seconds
    table = Table(given)
    begun = time.time()
    run_all(
        table.next,
        processes=given.processes,
        limit_s=given.limit,
        until=until,
        preload=PRELOAD,
    )
    print(f"{sum(len(rows) for rows in table.rows.values())} rows in {time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
