"""Volumes of a Gaussian random field with the power spectrum k^-n; n is what is to be learned.

CosmoFlow's outputs reach a little beyond -1 and 1: n, between 0.5 and 3, is written as (n - 1.75) / 1.25.
"""

import argparse
from pathlib import Path

import numpy as np

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--folder", default="volumes", type=Path)
parser.add_argument("--side", type=int, default=128)
parser.add_argument("--train", type=int, default=24)
parser.add_argument("--validation", type=int, default=8)
arguments = parser.parse_args()
arguments.folder.mkdir(parents=True, exist_ok=True)
random = np.random.default_rng(0)
side = arguments.side
waves = [np.fft.fftfreq(side) * side, np.fft.fftfreq(side) * side, np.fft.rfftfreq(side) * side]
k = np.sqrt(sum(axis**2 for axis in np.meshgrid(*waves, indexing="ij", sparse=True)))
k[0, 0, 0] = np.inf


def volume(slope):
    """A field of mean zero and variance one."""
    noise = np.fft.rfftn(random.standard_normal((side,) * 3))
    field = np.fft.irfftn(noise * k ** (-slope / 2), s=(side,) * 3, axes=(0, 1, 2))
    return ((field - field.mean()) / field.std()).astype(np.float32)[None]


for name, count in (("train", arguments.train), ("validation", arguments.validation)):
    rows = ["path,label"]
    for number in range(count):
        slope = random.uniform(0.5, 3.0)
        np.save(arguments.folder / f"{name}-{number:03}.npy", volume(slope))
        rows.append(f"{name}-{number:03}.npy,{(slope - 1.75) / 1.25:.4f}")
    (arguments.folder / f"{name}.csv").write_text("\n".join(rows) + "\n")
    print(arguments.folder / f"{name}.csv")
