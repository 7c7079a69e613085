"""Every model of the zoo under every policy beside plain training, bit for bit, many processes on one device.

    python benchmarks/within-exactness/run.py --out rows.jsonl --processes 10 --seconds 85
    python benchmarks/within-exactness/run.py --collect rows.jsonl rows-2.jsonl      (makes results/… and the table)

What a case costs is the interpreter's time, not the device's, so cases run side by side. The libraries are imported
once and the processes forked from there, before any of them touches the device; each takes the next case, the longest
first (as they were in the last result), and writes its row at once: a run that is cut off continues with --resume.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import platform
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that asking for CUDA does not start it before a fork
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.foreign.zoo import ZOO, Foreign, by_name
from tests.memory.examine import PRECISIONS, examine
from tests.memory.odd_networks import odd_network, odd_volume
from tests.memory.odd_sequences import odd_sequence

HERE = Path(__file__).parent
STARTED = time.time()
ODD = {"odd": odd_network, "odd volume": odd_volume, "odd sequence": odd_sequence}
Row = dict[str, Any]


def main() -> None:
    """Run, or collect what was run."""
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("exactness.jsonl"))
    options.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    options.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options.add_argument("--only", default="", help="models whose name contains one of these, comma-separated")
    options.add_argument("--without", default="monai/" if torch.cuda.is_available() else "", help="likewise, left out")
    options.add_argument("--resume", type=Path, nargs="*", default=[], help="rows that are there already")
    options.add_argument("--order", type=Path, nargs="*", default=[], help="rows that say how long cases take")
    options.add_argument(
        "--odd", type=int, default=0, help="instead of the zoo: so many networks of each kind drawn at random"
    )
    options.add_argument("--collect", type=Path, nargs="*", help="rows to make a result of")
    chosen = options.parse_args()
    warnings.simplefilter("ignore")  # of libraries, about what they will change
    if chosen.collect:
        collect(read(chosen.collect))
    else:
        run(chosen)


def run(chosen: argparse.Namespace) -> None:
    """Take all cases that are not there yet."""
    there = {(row["model"], row["precision"]) for row in read(chosen.resume)}
    only, without = ([part for part in text.split(",") if part] for text in (chosen.only, chosen.without))
    all_names = [f"{kind}/{number}" for number in range(chosen.odd) for kind in ODD] or [f.name for f in ZOO]
    names = [n for n in all_names if not any(w in n for w in without) and (not only or any(o in n for o in only))]
    precisions = (*PRECISIONS, "fp32 channels_last") if chosen.odd else PRECISIONS
    if chosen.odd and chosen.device == "cpu":
        precisions = ("fp32", "fp32 channels_last")  # see volumes.py
    cases = [(name, precision) for name in names for precision in precisions if (name, precision) not in there]
    lasted = seconds_before() | {(row["model"], row["precision"]): row["seconds"] for row in read(chosen.order)}
    cases.sort(key=lambda case: -lasted.get(case, 30.0))
    libraries(names)
    print(f"{len(cases)} cases, {len(there)} there already; imported after {time.time() - STARTED:.1f} s", flush=True)
    fork = multiprocessing.get_context("fork")
    following, lock = fork.Value("i", 0), fork.Lock()
    workers = [fork.Process(target=work, args=(cases, following, lock, chosen)) for _ in range(chosen.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"done after {time.time() - STARTED:.1f} s", flush=True)


def model_of(name: str) -> Foreign:
    """The model of a name: of the zoo, or drawn at random."""
    kind, _, number = name.partition("/")
    return ODD[kind](int(number)) if kind in ODD else by_name(name)


def libraries(names: Iterable[str]) -> None:
    """Import all that the models need, so that forked processes have it; some is imported by building only."""
    for name in names:
        if name.startswith("hf/"):
            with torch.device("meta"):
                by_name(name).build()
    for library in {name.partition("/")[0] for name in names} - {"hf", *ODD}:
        __import__(library)
    gc.collect()
    gc.freeze()  # nobody collects these again, in any process
    torch.set_num_threads(1)


def work(cases: list[tuple[str, str]], following: Any, lock: Any, chosen: argparse.Namespace) -> None:
    """Take the next case until there is none, or no time."""
    device = torch.device(chosen.device)
    while time.time() - STARTED < chosen.seconds:
        with following.get_lock():
            number = following.value
            following.value += 1
        if number >= len(cases):
            return
        name, precision = cases[number]
        begin = time.time()
        try:
            found = asdict(examine(model_of(name), device, precision))
        except Exception as error:
            found = {
                "outcome": "failed",
                "note": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc()[-1500:],
            }
        row = {"model": name, "precision": precision, "device": device.type, **found}
        row |= {"seconds": round(time.time() - begin, 1), "began": round(begin - STARTED, 1), **environment(device)}
        with lock, chosen.out.open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()


def environment(device: torch.device) -> Row:
    """Where a row was made, and with which code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"on": name, **versions, "date": str(date.today()), "code": code()}


@cache
def code() -> str:
    """A fingerprint of what a step under policies runs: the package without what serves other subjects."""
    package = HERE.parents[1] / "src" / "outcore"
    files = sorted(f for part in ("graph", "memory", "ops") for f in (package / part).glob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12]


def seconds_before() -> dict[tuple[str, str], float]:
    """How long each case took when results were last made."""
    return {(row["model"], row["precision"]): row["seconds"] for row in results()}


def results() -> list[Row]:
    """Rows of all results, the last of each case."""
    found = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))]
    return list({key(row): row for rows in found if isinstance(rows, list) for row in rows}.values())


def read(paths: Iterable[Path]) -> list[Row]:
    """Rows of several files, the last of each case."""
    lines = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    return list({key(row): row for row in lines}.values())


def key(row: Row) -> tuple[str, str, str]:
    """What a row is about."""
    return row["model"], row["precision"], row.get("device", "")


def collect(rows: list[Row]) -> None:
    """Write rows as a result of their day, device and kind, and say how they ended."""
    for device, odd in sorted({(row["on"], drawn(row)) for row in rows}):
        of = sorted(
            (r for r in rows if (r["on"], drawn(r)) == (device, odd)), key=lambda r: (r["model"], r["precision"])
        )
        name = f"{max(r['date'] for r in of)}-{'h200' if 'H200' in device else device.split()[-1].lower()}"
        path = HERE / "results" / f"{name}{'-odd' if odd else ''}.json"
        path.write_text("[\n" + ",\n".join(json.dumps(r) for r in of) + "\n]\n")
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition("<!-- made by --collect -->\n")
    after = rest.partition("<!-- end -->\n")[2]
    made = table(results())
    readme.write_text(f"{before}<!-- made by --collect -->\n{made}\n<!-- end -->\n{after}")
    print(made)


def drawn(row: Row) -> bool:
    """Whether the network of a row was drawn at random."""
    return row["model"].partition("/")[0] in ODD


def table(rows: list[Row]) -> str:
    """How many cases ended how, with which code, and those of the zoo that are not simply equal by name."""
    outcomes = ["equal", "equal where plain repeats itself", "runs as it is", "not trainable", "unequal", "failed"]
    lines = [
        f"| on | models | precision | cases | {' | '.join(outcomes)} |",
        "|---|---|---|---|" + "---|" * len(outcomes),
    ]
    for odd, device, precision in sorted({(drawn(r), r["on"], r["precision"]) for r in rows}):
        of = [r for r in rows if (drawn(r), r["on"], r["precision"]) == (odd, device, precision)]
        counts = [str(sum(r["outcome"] == outcome for r in of)) for outcome in outcomes]
        kind = "drawn at random" if odd else "of libraries"
        lines.append(f"| {device} | {kind} | {precision} | {len(of)} | {' | '.join(counts)} |")
    lines += ["", "| code | on | models | cases |", "|---|---|---|---|"]
    codes = Counter((drawn(r), r["on"], r.get("code", "not noted")) for r in rows)
    for (odd, device, made), count in sorted(codes.items()):
        lines.append(f"| {made} | {device} | {'drawn at random' if odd else 'of libraries'} | {count} |")
    lines += ["", "| model | precision | on | ended | how |", "|---|---|---|---|---|"]
    for r in sorted(rows, key=lambda r: (r["model"], r["precision"], r["on"])):
        if r["outcome"] in ("unequal", "failed") or (not drawn(r) and (r["outcome"] != "equal" or r["note"])):
            lines.append(f"| {r['model']} | {r['precision']} | {r['on']} | {r['outcome']} | {r['note']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
