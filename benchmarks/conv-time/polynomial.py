"""The talks' own model, for comparison: a polynomial in the layer's sizes, fitted to raw milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outcore.cost import Operation, Sample


def sizes(operations: Sequence[Operation]) -> npt.NDArray[np.float64]:
    """In and out channels, kernel, image side and batch: what the talks regress on."""
    return np.array([(o.in_channels, o.out_channels, o.kernel[0], o.size[0], o.batch) for o in operations], dtype=float)


def predict_raw(train: Sequence[Sample], test: Sequence[Operation], *, degree: int) -> npt.NDArray[np.float64]:
    """Predicted seconds, direction by direction; nothing keeps them positive."""
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures

    predicted = np.zeros(len(test))
    for direction in ("forward", "backward"):
        here = [sample for sample in train if sample.operation.direction == direction]
        there = [position for position, operation in enumerate(test) if operation.direction == direction]
        if not here or not there:
            continue
        model = make_pipeline(PolynomialFeatures(degree), LinearRegression())
        model.fit(sizes([s.operation for s in here]), [s.timing.median_s for s in here])
        predicted[there] = model.predict(sizes([test[position] for position in there]))
    return predicted
