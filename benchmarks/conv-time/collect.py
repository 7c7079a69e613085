"""Measure: probe the machine, sweep operations, and time the convolutions of the talks and the held-out ones.

Needs only torch, so it runs where the device is; `report.py` fits and draws, anywhere. Everything is appended
to files under --output as it is made: stop it at any time, start it again to go on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import convolutions
import torch
from as_networks import as_networks_have

from outcore.cost.measured.calibrate import collect, collect_listed
from outcore.machine import Machine, probe

LONG_KERNELS = (1, 3, 3, 5, 5, 5, 7, 7, 7)
TURNS = 6


def _probe(cache: Path) -> Machine:
    return probe(fresh=True, cache=cache, progress=lambda done, total, words: print(f"  {words}", flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory of the samples")
    parser.add_argument("--seconds", type=float, default=240, help="time for the sweeps, all precisions together")
    parser.add_argument("--dtypes", default="tf32,bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--held-out", type=int, default=120, help="held-out measurements per precision")
    parser.add_argument("--family-seconds", type=float, default=60, help="time for convolutions like the talks'")
    parser.add_argument("--long-seconds", type=float, default=30, help="time for more of them, most with long kernels")
    parser.add_argument("--parts-seconds", type=float, default=60, help="time for single products of backward")
    parser.add_argument("--networks-seconds", type=float, default=40, help="time for operations as networks have them")
    parser.add_argument("--machine", type=Path, help="a machine that was probed before")
    parser.add_argument("--threads", type=int, help="threads of a CPU run")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    place = "cuda:0" if torch.cuda.is_available() else "cpu"
    started = time.monotonic()
    machine = Machine.load(options.machine) if options.machine else _probe(options.output / "cache")
    if options.threads and place == "cpu":
        device = replace(machine.device(), sms=options.threads)
        machine = replace(machine, devices=(device,), host=device)
    machine.save(options.output / "machine.json")
    print(machine, f"\nprobed in {time.monotonic() - started:.0f} s", flush=True)

    device, dtypes = machine.device(), options.dtypes.split(",")
    for dtype in dtypes if options.held_out else ():
        listed = convolutions.two(dtype=dtype)
        for batch in (1, 4, 16) if place != "cpu" else (1,):
            for channels_last in (False, True) if place != "cpu" else (False,):
                listed += convolutions.twelve(batch=batch, dtype=dtype, channels_last=channels_last)
        run = {"device": device, "place": place, "dtype": dtype}
        collect_listed(listed, path=options.output / f"talks-{dtype}.jsonl", seconds=150, **run)
        others = convolutions.held_out(device, dtype=dtype, count=options.held_out)
        collect_listed(others, path=options.output / f"held-out-{dtype}.jsonl", seconds=60, **run)
        print(f"{dtype}: talks and held-out after {time.monotonic() - started:.0f} s", flush=True)
    for dtype in dtypes if options.family_seconds else ():
        run = {"device": device, "place": place, "dtype": dtype, "each_s": 0.006 if place != "cpu" else 0.05}
        for name, seed, seconds in (
            ("family-held-out", 1, 4 if place != "cpu" else 25),
            ("family", 0, options.family_seconds / len(dtypes)),
        ):
            samples = collect_listed(
                convolutions.family(device, dtype=dtype, seed=seed),
                path=options.output / f"{name}-{dtype}.jsonl",
                seconds=seconds,
                most=300 if seed else None,
                **run,
            )
            print(f"{dtype}: {len(samples)} of the {name} after {time.monotonic() - started:.0f} s", flush=True)
    # Long kernels err most in cross-validation. In turns, so that a run that is cut off has both precisions.
    for share in itertools.chain.from_iterable([dtypes] * TURNS if options.long_seconds and place != "cpu" else []):
        samples = collect_listed(
            itertools.islice(convolutions.family(device, dtype=share, seed=4, kernels=LONG_KERNELS), 20_000),
            device,
            place,
            dtype=share,
            path=options.output / f"long-{share}.jsonl",
            seconds=options.long_seconds / len(dtypes) / TURNS,
            each_s=0.003,
        )
        print(f"{share}: {len(samples)} with long kernels after {time.monotonic() - started:.0f} s", flush=True)
    for dtype in dtypes if options.parts_seconds else ():
        samples = collect_listed(
            convolutions.parts(device, dtype=dtype),
            device,
            place,
            dtype=dtype,
            path=options.output / f"parts-{dtype}.jsonl",
            seconds=options.parts_seconds / len(dtypes),
            each_s=0.005 if place != "cpu" else 0.05,
        )
        print(f"{dtype}: {len(samples)} of the parts after {time.monotonic() - started:.0f} s", flush=True)
    for dtype in dtypes if options.networks_seconds and place != "cpu" else ():
        samples = collect_listed(
            as_networks_have(device, dtype=dtype),
            device,
            place,
            dtype=dtype,
            path=options.output / f"networks-{dtype}.jsonl",
            seconds=options.networks_seconds / len(dtypes),
            each_s=0.004,
        )
        print(f"{dtype}: {len(samples)} as networks have them after {time.monotonic() - started:.0f} s", flush=True)
    for dtype in dtypes if options.seconds else ():
        samples = collect(
            device,
            place,
            dtype=dtype,
            path=options.output / f"sweep-{dtype}.jsonl",
            seconds=options.seconds / len(dtypes),
        )
        print(f"{dtype}: {len(samples)} samples after {time.monotonic() - started:.0f} s", flush=True)
    environment = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "seconds": round(time.monotonic() - started, 1),
    }
    (options.output / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")


if __name__ == "__main__":
    main()
