"""How long it takes to profile a network on an image that fits nowhere, and what is said of it.

    python benchmarks/profile-slide/run.py --out benchmarks/profile-slide/results

A process for each size does what `outcore profile torchvision.models:resnet50 -i 1x3xSIDExSIDE --on h200 --estimate`
does, imports and all; nothing of the network is run. torchvision without its compiled operators gets their names first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIDES = (224, 8192, 32_768, 100_000)
COMMAND = """
import sys
from tests.foreign.shim import define_torchvision_operators
define_torchvision_operators()
from outcore.cli.main import main
sys.argv = ["outcore", *sys.argv[1:]]
main()
"""


def run(side: int, *options: str) -> str:
    words = ["profile", "torchvision.models:resnet50", "-i", f"1x3x{side}x{side}", "--on", "h200", "--estimate"]
    command = [sys.executable, "-c", COMMAND, *words, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the dated JSON")
    given = parser.parse_args()
    rows = []
    for side in SIDES:
        start, busy = time.perf_counter(), processor_s()
        said = json.loads(run(side, "--json"))
        row = {"side": side, "seconds": time.perf_counter() - start, "processor_s": processor_s() - busy}
        found = said["profiles"][0] if "profiles" in said else said
        row |= {k: found[k] for k in ("step_s", "interval_s", "peak_bytes", "capacity_bytes", "too_large")}
        rows.append(row | {"calls": len(found["costs"]["calls"])})
        print(f"{side} px: {row['seconds']:.1f} s, {row['processor_s']:.1f} s of one core; step {row['step_s']:.3g} s,")
        print(f"    peak {row['peak_bytes'] / 2**30:,.1f} GiB, {len(row['too_large'])} calls larger than the device")
    print(run(SIDES[-1]))
    date = datetime.date.today().isoformat()
    environment = {"date": date, "python": platform.python_version(), "processor": platform.machine()}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{date}.json").write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
