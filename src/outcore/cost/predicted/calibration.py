"""A calibration: how well one device does each kind of operation in one precision.

It answers the question "how long would this operation take?" without the device, with four things beside the
time: an interval, the roofline it was derived from, the efficiency, and how far it can be trusted:

    measured range   a fitted kind, within the sizes that were sampled
    extrapolated     a fitted kind, outside them; the answer tends to the median efficiency
    roofline         a kind of which there is no sample: roofline over the median efficiency of all kinds, or one half
    scaled           carried over to another device by its rates

It is stored as one (gzipped) JSON document with its own held-out errors inside. The calibrations of some devices ship
with the package; those a user makes are kept in the cache directory, and the one of more samples goes first.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np

from outcore.cost.calibration_schema import calibration_schema
from outcore.cost.measured.in_network_ratio import InNetworkRatio
from outcore.cost.measured.samples import Sample
from outcore.cost.predicted.efficiency import Efficiency, fit_efficiency
from outcore.cost.predicted.features import NAMES
from outcore.cost.predicted.operation import KINDS, Operation
from outcore.cost.predicted.regression import METHODS
from outcore.cost.predicted.roofline import UNFITTED_EFFICIENCY, Ceiling
from outcore.documents.reading import read_json
from outcore.documents.schema import MapOf, check
from outcore.errors import MachineError
from outcore.machine.clock import TimedRuns
from outcore.machine.device import ELEMENT_BYTES, Device, precision_of
from outcore.machine.probe import cache_directory

VERSION = 1
_NO_CACHE = 8.0
_BIAS = NAMES.index("bias")
LEAST = 8
"""With fewer samples a kind is said to be known little, and a family of convolutions is predicted as its kind is: one
slow sample of a first layer made every first layer a hundred times too slow."""
_LEAST_OF_A_PART = 20
"""With fewer samples of single products, a model of both products together is better."""

Trust = Literal["measured range", "extrapolated", "roofline", "scaled"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long one operation is expected to take."""

    time_s: float
    low_s: float
    high_s: float
    """The measured time of four operations in five lies between these, as held-out samples show."""
    roofline_s: float
    efficiency: float
    trust: Trust
    dispatch_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Everything learned of one device in one precision."""

    device: str
    dtype: str
    base: Ceiling
    """The ceiling of the device by its probed rates."""
    models: Mapping[str, Efficiency]
    """By kind and direction: "conv/forward"."""
    about: Mapping[str, Any]
    """Where it was measured: torch, date, threads."""
    scaled_to: str = ""
    usage: Mapping[str, InNetworkRatio] = field(default_factory=dict)
    """By kind and direction: what calls of networks take over what was learned from the sweep."""

    def predict(self, operations: Sequence[Operation]) -> list[Prediction]:
        """The expected time of each operation.

        Raises:
            MachineError: if an operation has another precision than this calibration.
        """
        predictions: list[Prediction | None] = [None] * len(operations)
        groups: dict[str, list[int]] = {}
        for position, operation in enumerate(operations):
            if operation.dtype != self.dtype:
                needed = f"a {self.dtype} calibration predicts only {self.dtype} operations"
                raise MachineError(f"{needed}, got {operation}")
            groups.setdefault(self._model_of(operation), []).append(position)
        for name, positions in groups.items():
            group = [operations[position] for position in positions]
            for position, prediction in zip(positions, self._of(name, group), strict=True):
                predictions[position] = prediction
        return [prediction for prediction in predictions if prediction is not None]

    def _model_of(self, operation: Operation) -> str:
        """The nearest model there is: of the family and the product, of the kind and the product, of the direction."""
        names = [f"{family}/{operation.part}" for family in (operation.family, *_near(operation), operation.kind)]
        return next((n for n in names if n in self.models), f"{operation.kind}/{operation.direction}")

    def _of(self, name: str, operations: Sequence[Operation]) -> list[Prediction]:
        """Predictions by one model; for a backward pass of two products, combined with the predictions of each.

        The two ways err differently, so the geometric mean of both is taken, if the single products are as well known
        as both together.
        """
        whole = self._predict_biased(name, operations)
        parts = [f"{name.partition('/')[0]}/{part}" for part in ("weight", "input")]
        if not name.endswith("/backward") or not all(part in self.models for part in parts):
            return whole
        if max(self.models[part].errors["median"] for part in parts) > self.models[name].errors["median"]:
            return whole
        weight = self._predict(parts[0], [o.parts()[0] for o in operations])
        of_input = self._predict(parts[1], [o.parts()[-1] for o in operations])
        rows = zip(operations, whole, weight, of_input, strict=True)
        return [_together(w, i, p, _bias_s(o, self.base)) for o, p, w, i in rows]

    def _predict_biased(self, name: str, operations: Sequence[Operation]) -> list[Prediction]:
        """Predictions of a model that may never have seen a convolution without bias: the pass for it is subtracted."""
        model = self.models.get(name)
        if model is None or model.low[_BIAS] < 1:
            return self._predict(name, operations)
        predicted = self._predict(name, [replace(o, bias=True) for o in operations])
        return [
            p if o.bias else replace(p, time_s=max(p.roofline_s, p.time_s - _bias_s(o, self.base)))
            for p, o in zip(predicted, operations, strict=True)
        ]

    def _predict(self, name: str, operations: Sequence[Operation]) -> list[Prediction]:
        model = self.models.get(name)
        if model is None:
            known = [m.rate or m.median for m in self.models.values()]
            middle = float(np.median(known or [UNFITTED_EFFICIENCY]))
            rooflines = [self.base.time_s(operation) for operation in operations]
            return [Prediction(t / middle, t, 10 * t / middle, t, middle, "roofline") for t in rooflines]
        efficiencies, beyond = model.predict(operations)
        predictions = []
        for operation, efficiency, outside in zip(operations, efficiencies, beyond, strict=True):
            roofline_s = model.ceiling.time_s(operation)
            time_s = roofline_s / float(efficiency)
            trust: Trust = "scaled" if self.scaled_to else "extrapolated" if outside > 0 else "measured range"
            wider = 2.0 ** min(float(outside), 3.0)
            low_s, high_s = max(roofline_s, time_s * model.spread[0] / wider), time_s * model.spread[1] * wider
            predictions.append(
                Prediction(time_s, low_s, high_s, roofline_s, float(efficiency), trust, model.dispatch_s)
            )
        return predictions

    def scaled(self, device: Device) -> Calibration:
        """The same efficiencies under the ceilings of another device: a guess for one that was never
        calibrated."""
        target = Ceiling.of(device, self.dtype)
        flops, nbytes = target.flops_per_s / self.base.flops_per_s, target.bytes_per_s / self.base.bytes_per_s

        def carried(ceiling: Ceiling) -> Ceiling:
            return Ceiling(ceiling.flops_per_s * flops, ceiling.bytes_per_s * nbytes, ceiling.floor_s, target.sms)

        models = {name: replace(model, ceiling=carried(model.ceiling)) for name, model in self.models.items()}
        return replace(self, base=carried(self.base), models=models, scaled_to=device.name)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dictionaries and numbers."""
        base = self.base
        return {
            "version": VERSION,
            "device": self.device,
            "dtype": self.dtype,
            "about": dict(self.about),
            "features": list(NAMES),
            "base": [base.flops_per_s, base.bytes_per_s, base.floor_s, base.sms],
            "models": {name: model.to_json() for name, model in self.models.items()},
            "usage": {name: usage.to_json() for name, usage in self.usage.items()},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], source: str | Path = "a calibration") -> Calibration:
        """The calibration that `to_json` described.

        Raises:
            MachineError: it is something else; names the place in `source`.
        """
        version = check(document, MapOf(), source, MachineError).get("version")
        if version != VERSION:
            raise MachineError(f"{source}: version is {version}; this outcore reads {VERSION}")
        features = document.get("features")
        if not isinstance(features, (list, tuple)) or tuple(features) != NAMES:
            raise MachineError(f"{source} has other features than are used now; calibrate the device again")
        check(document, calibration_schema(), source, MachineError)
        models = {name: Efficiency.from_json(model) for name, model in document["models"].items()}
        usage = {name: InNetworkRatio.from_json(one) for name, one in document.get("usage", {}).items()}
        base = Ceiling(*document["base"])
        return cls(document["device"], document["dtype"], base, models, document["about"], usage=usage)

    def save(self, path: str | Path) -> None:
        """Write the calibration as JSON, gzipped where the name ends in .gz; a reader never sees half a file."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(target.name + ".part")
        text = json.dumps(self.to_json(), separators=(",", ":")) + "\n"
        # No date inside the archive: the same calibration is the same file.
        aside.write_bytes(gzip.compress(text.encode(), mtime=0) if target.suffix == ".gz" else text.encode())
        aside.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a calibration that `save` wrote."""
        return cls.from_json(read_json(path, MapOf(), MachineError), path)

    @classmethod
    def shipped(cls, device: str, dtype: object) -> Calibration | None:
        """The calibration of a device that comes with the package, if there is one.

        >>> Calibration.shipped("abacus", "fp32") is None
        True
        """
        return _shipped(file_name(device, dtype))

    @classmethod
    def find(cls, device: str, dtype: object, *, cache: Path | None = None) -> Calibration | None:
        """The user's own calibration of a device, or the one that ships if that was made from more samples."""
        path = (cache if cache is not None else cache_directory()) / file_name(device, dtype)
        shipped = cls.shipped(device, dtype)
        if not path.exists():
            return shipped
        own = cls.load(path)
        enough = own.models and (shipped is None or shipped.samples <= own.samples)
        return own if enough else shipped

    @property
    def samples(self) -> int:
        """How many measurements it was fitted to; one that serves several kinds counts for each."""
        return sum(model.samples for model in self.models.values())

    def errors(self) -> dict[str, tuple[int, str, float, float]]:
        """By kind and direction: samples, method, and held-out median and p90 error."""
        return {
            name: (model.samples, model.method, model.errors["median"], model.errors["p90"])
            for name, model in self.models.items()
        }


def _bias_s(operation: Operation, base: Ceiling) -> float:
    """The pass over the output that adds a bias (read and written), or sums its gradient (read)."""
    if not operation.kind.startswith("conv"):
        return 0.0
    passes = 2 if operation.direction == "forward" else 1
    return passes * operation.out_elements * ELEMENT_BYTES[operation.dtype] / base.bytes_per_s


def _together(weight: Prediction, of_input: Prediction, whole: Prediction, bias_s: float) -> Prediction:
    """One prediction from that of both products and those of each."""
    sum_s = weight.time_s + of_input.time_s + bias_s
    time_s = float(np.sqrt(sum_s * whole.time_s))
    ratio = time_s / whole.time_s
    return replace(whole, time_s=time_s, low_s=whole.low_s * ratio, high_s=whole.high_s * ratio)


def file_name(device: str, dtype: object) -> str:
    """The file that holds the calibration of a device and precision."""
    plain = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    return f"{plain}-{precision_of(dtype)}.json.gz"


@functools.cache
def _shipped(name: str) -> Calibration | None:
    found = resources.files("outcore.cost").joinpath("calibrations").joinpath(name)
    return Calibration.from_json(json.loads(gzip.decompress(found.read_bytes()))) if found.is_file() else None


def _joined(samples: Sequence[Sample]) -> list[Sample]:
    """Whole backward passes from the two products of one convolution, measured one after the other."""
    input_products = {s.operation: s for s in samples if s.operation.part == "input"}
    found = []
    for sample in samples:
        both = replace(sample.operation, input_grad=True)
        other = input_products.get(replace(both, weight_grad=False)) if sample.operation.part == "weight" else None
        if other is not None:
            found.append(Sample(both, _summed(sample.timing, other.timing)))
    return found


def _summed(first: TimedRuns, second: TimedRuns) -> TimedRuns:
    return TimedRuns(
        first.min_s + second.min_s,
        first.median_s + second.median_s,
        first.max_s + second.max_s,
        first.mean_s + second.mean_s,
        min(first.runs, second.runs),
        first.dispatch_s,
    )


def _near(operation: Operation) -> tuple[str, ...]:
    """Families that also learn from an operation, and stand in for its own: first layers are convolutions too."""
    return {"first": ("dense", "conv"), "dense": ("conv",)}.get(operation.family, ())


def training_samples(samples: Sequence[Sample], base: Ceiling, family: str, part: str) -> list[Sample]:
    """The samples that a family in one direction is fitted to; odd convolutions, which are few, learn from all."""

    def fits(operation: Operation) -> bool:
        return family in (operation.family, *_near(operation)) and operation.part == part

    # Faster than any cache: the operation turned out to be a view, and nothing was moved.
    found = [s for s in (*samples, *_joined(samples)) if fits(s.operation)]
    return [s for s in found if 0 < s.operation.nbytes < _NO_CACHE * base.bytes_per_s * s.timing.median_s]


def fit_calibration(
    samples: Sequence[Sample],
    device: Device,
    dtype: str,
    *,
    about: Mapping[str, Any] | None = None,
    methods: Sequence[str] = METHODS,
) -> Calibration:
    """Fit every kind and direction of which there are samples, and every family that has enough of its own."""
    base = Ceiling.of(device, dtype)
    models: dict[str, Efficiency] = {}
    for family in ("depthwise", "first", "dense", *KINDS):
        for part in ("forward", "backward", "weight", "input"):
            chosen = training_samples(samples, base, family, part)
            least = 1 if family in KINDS else LEAST
            if len(chosen) >= (least if part in ("forward", "backward") else _LEAST_OF_A_PART):
                models[f"{family}/{part}"] = fit_efficiency(chosen, base, methods=methods)
    return Calibration(device.name, dtype, base, models, dict(about or {}))
