"""A stand-in for the Hymenoptera images: train and val, with one folder for each class."""

import argparse
from pathlib import Path

import numpy as np

try:
    from PIL import Image
except ImportError:
    raise SystemExit("pictures need Pillow; type: pip install pillow") from None

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--folder", default="hymenoptera", type=Path)
parser.add_argument("--train", type=int, default=16)
parser.add_argument("--val", type=int, default=8)
arguments = parser.parse_args()
random = np.random.default_rng(0)
for split, count in (("train", arguments.train), ("val", arguments.val)):
    for kind, name in enumerate(("ants", "bees")):
        folder = arguments.folder / split / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            height, width = random.integers(180, 320, 2)
            stripes = np.sin(np.arange(width) / random.uniform(4, 9))[None, :, None] * (60 if kind else 0)
            image = random.normal(130, 30, (height, width, 3)) + stripes
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{number:03}.jpg")
print(arguments.folder)
