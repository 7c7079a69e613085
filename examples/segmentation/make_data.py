"""Slides and masks: 0 glass, 1 and 2 the two kinds of tissue."""

import argparse

from outcore.data import write_slides

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--folder", default="slides")
parser.add_argument("--side", type=int, default=1024)
parser.add_argument("--train", type=int, default=8)
parser.add_argument("--validation", type=int, default=2)
arguments = parser.parse_args()
size = (arguments.side, arguments.side)
for name, count, seed in (("train.csv", arguments.train, 0), ("validation.csv", arguments.validation, 1)):
    print(write_slides(arguments.folder, count, size=size, tile=64, seed=seed, share=0.4, masks=True, name=name))
