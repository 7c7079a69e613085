"""Classes have colours of their own, also where there are more classes than colours."""

from __future__ import annotations

import numpy as np

from outcore.infer.palette import _CLASSES, class_colours


def test_more_classes_than_colours_still_differ_and_each_round_is_darker() -> None:
    colours = len(_CLASSES)
    found = class_colours(3 * colours)
    assert found.shape == (3 * colours, 3) and found.dtype == np.uint8
    assert np.array_equal(found[:colours], np.array(_CLASSES))
    assert len({tuple(row) for row in found.tolist()}) == 3 * colours
    assert (found[colours:].astype(int).sum(1) < found[:-colours].astype(int).sum(1)).all()
