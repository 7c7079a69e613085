"""Slides that show what the task asks for: two pieces of tissue, of one kind or of two."""

import argparse

from outcore.data import write_slides

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--folder", default="slides")
parser.add_argument("--side", type=int, default=2048)
parser.add_argument("--train", type=int, default=16)
parser.add_argument("--validation", type=int, default=8)
arguments = parser.parse_args()
size = (arguments.side, arguments.side)
tile = min(512, 1 << (arguments.side.bit_length() - 2))
print(write_slides(arguments.folder, arguments.train, size=size, tile=tile, name="train.csv"))
print(write_slides(arguments.folder, arguments.validation, size=size, tile=tile, seed=1, name="validation.csv"))
