"""Measure and report in one go: `python benchmarks/conv-time/run.py --output DIR`.

On a CUDA machine about six minutes of measuring (TF32 and bf16, both memory formats, forward and backward) and a few of
fitting; without one, a small sweep in fp32. The two halves can also be run apart: `collect.py` where the device is,
`report.py` anywhere.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory of samples, results and calibration")
    options, rest = parser.parse_known_args()
    collect = [str(HERE / "collect.py"), "--output", str(options.output), *rest]
    report = [str(HERE / "report.py"), "--refit", "--samples", str(options.output)]
    report += ["--results", str(options.output / "results"), "--calibrations", str(options.output / "calibrations")]
    for command in (collect, report):
        subprocess.run([sys.executable, *command], check=True)


if __name__ == "__main__":
    main()
