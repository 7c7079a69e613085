"""The step of ``fit`` itself, for a plan: traced to predict its peak, and run on zeros to see it.

What a step takes is decided by the very function that ``fit`` runs: its loss, metrics and optimizer, and even the names
of its operations, by which TensorFlow's graph optimizer decides what to compute first (`optimized_graph`). So a plan
is tried with Keras' own ``fit``. The model itself must not notice: a second functional model with the same layers and
the same name is compiled with copies of the optimizer and the metrics, and with the same loss on targets as large as
it asks for. Weights, statistics and seeds are put back afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from outcore.keras.fit_loss import FitLoss
from outcore.keras.tensorflow.calls import Calls
from outcore.keras.tensorflow.executor import threads
from outcore.keras.tensorflow.graph_memory import graph_memory
from outcore.keras.tensorflow.micro_batches import accumulating_step
from outcore.keras.tensorflow.optimized_graph import optimized
from outcore.keras.tensorflow.segments import Segment, SegmentedCall
from outcore.keras.tensorflow.traced import StepFacts
from outcore.keras.twin import substitute

__all__ = ["FitTrial"]

_STEPS, _EPOCHS = 2, 3
"""How many steps a trial takes: threads run operations in another order every time, and free memory lies elsewhere."""
_SMALLEST_CHUNK = 256 * 1024


class FitTrial:
    """Peaks of a step of ``fit`` by segments, predicted and seen.

    Args:
        keras: the module.
        model: that is planned.
        functional: the functional model in it.
        calls: of it.
        specs: shapes and types of a batch.
        facts: of a plain step over a micro-batch.
        parts: the number of micro-batches.
        optimizer: the size of its state over that of the weights, where the model is not compiled.
    """

    def __init__(
        self,
        keras: Any,
        model: Any,
        functional: Any,
        calls: Calls,
        specs: Sequence[Any],
        facts: StepFacts,
        parts: int,
        optimizer: float | None,
    ) -> None:
        self.keras, self.model, self.functional, self.calls = keras, model, functional, calls
        self.tf = importlib.import_module("tensorflow")
        self.specs, self.parts, self.state = list(specs), parts, optimizer
        self.facts = facts
        self.standing: list[int] = []
        """Sizes of what is there throughout a step."""
        self.loss = FitLoss(keras, model)
        if not self._takes_loss():
            self.loss.given, self.loss.weights = "mse", None
        self.targets = self._targets(self.specs[0].shape[0])
        self.measures = True
        """Whether the metrics of the model take such targets."""
        self._last: tuple[tuple[Segment, ...], Any] = (), None
        self._spread: dict[tuple[Segment, ...], int] = {}
        """How far a predicted peak is above that of half of all histories."""
        self._peaks: dict[tuple[Segment, ...], int] = {}

    @property
    def target_bytes(self) -> list[int]:
        """The sizes of targets of a batch."""
        return [math.prod(spec.shape) * int(spec.dtype.size) for spec in self.keras.tree.flatten(self.targets)]

    def peak(self, segments: tuple[Segment, ...], limit_bytes: float = math.inf) -> int:
        """Predicted: of the step over a micro-batch, from the graph that TensorFlow runs; less well above a limit."""
        batch = math.ceil(self.specs[0].shape[0] / self.parts)
        inputs = [self.tf.TensorSpec((batch, *spec.shape[1:]), spec.dtype) for spec in self.specs]
        targets = self._targets(batch)
        try:
            function = self._traced(self.fitted(segments), inputs, targets)
        except (ValueError, TypeError, self.tf.errors.OpError):
            if not self.measures:
                raise
            self._empty(self._last[1])
            self.measures, self._last = False, ((), None)  # metrics of one's own may ask for other targets
            function = self._traced(self.fitted(segments), inputs, targets)
        found = graph_memory(optimized(function), self.standing, workers=threads(self.tf), limit_bytes=limit_bytes)
        self._spread[segments], self._peaks[segments] = found.spread_bytes, found.peak_bytes
        return found.peak_bytes

    def check_parts(self) -> None:
        """Trace the step over micro-batches, which refuses losses that are no mean over a batch."""
        whole = self.fitted((Segment(0, len(self.calls.calls)),))
        self._traced(whole, self.specs, self.targets, whole.train_step)

    def _traced(self, fitted: Any, inputs: list[Any], targets: Any, train_step: Any = None) -> Any:
        """The step of ``fit`` over a micro-batch, or another, as a traced function."""

        def step(*flat: Any) -> Any:
            x = self._structured(flat[: len(inputs)])
            y = self.keras.tree.pack_sequence_as(targets, list(flat[len(inputs) :]))
            return type(fitted).train_step(fitted, (x, y)) if train_step is None else train_step((x, y))

        try:
            given = [*inputs, *self.keras.tree.flatten(targets)]
            return self.tf.function(step, autograph=False).get_concrete_function(*given)
        finally:
            self.model._clear_losses()

    def run(self, segments: tuple[Segment, ...]) -> int | None:
        """What some steps of ``fit`` take, with what stands throughout; none where it is not counted.

        What a step takes depends on where free memory lies (`graph_memory`), so it is run with some of it taken away,
        too; the largest peak counts, or the middle one with the spread that the graph has.
        Twice the prediction where the device has no room for it. Not in float64, whose convolutions on a CPU unfold
        all images of a batch at once: there it is a prediction.
        """
        tf = self.tf
        if any(v.dtype == "float64" for v in self.model.trainable_variables):
            return None
        device = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
        before = [(v, np.array(self.keras.ops.convert_to_numpy(v.value))) for v in self.model.variables]
        fitted = self.fitted(segments)
        x = self._structured([tf.zeros(spec.shape, spec.dtype) for spec in self.specs])
        y = self.keras.tree.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), self.targets)
        data = tf.data.Dataset.from_tensors((x, y)).repeat(_STEPS)
        peaks: list[int] = []
        try:
            for number in range(_EPOCHS):
                scattered = self._scattered(segments, number) if number else []
                tf.config.experimental.reset_memory_stats(device)
                standing = tf.config.experimental.get_memory_info(device)["current"]
                fitted.fit(data, shuffle=False, verbose=0)
                peaks.append(int(tf.config.experimental.get_memory_info(device)["peak"]) - int(standing))
                del scattered
        except tf.errors.ResourceExhaustedError:
            if not peaks:
                return 2 * self.peak(segments)
        except ValueError:  # TensorFlow does not count on this device
            return None
        finally:
            for variable, value in before:
                variable.assign(value)
        middle = int(statistics.median(peaks))
        return max(*peaks, middle + self._spread.get(segments, 0)) + sum(self.standing)

    def _scattered(self, segments: tuple[Segment, ...], number: int) -> list[Any]:
        """A few small tensors somewhere in free memory, so that a step finds it otherwise than the last."""
        draw = np.random.default_rng(number)
        largest = max(2 * _SMALLEST_CHUNK, self._peaks.get(segments, 0) // 24)
        taken = [self.tf.zeros((int(n),), self.tf.uint8) for n in draw.integers(_SMALLEST_CHUNK, largest, 12)]
        return [tensor for tensor in taken if draw.random() < 0.5]

    def forget(self) -> None:
        """Let go of the models that were tried, and of their batches: they refer to themselves, and would stay."""
        self._empty(self._last[1])
        self._last = (), None
        gc.collect()

    def _empty(self, made: Any) -> None:
        """Take the memory of a tried model's own variables: traced functions hold them for as long as the process."""
        known = {id(v) for v in self.model.variables}
        for variable in [] if made is None else [*made.optimizer.variables, *made.variables]:
            if id(variable) not in known and math.prod(variable.shape) > 1:
                held = variable.value
                empty = self.tf.zeros((0,), held.dtype)
                self.tf.raw_ops.AssignVariableOp(resource=held.handle, value=empty, validate_shape=False)

    def fitted(self, segments: tuple[Segment, ...]) -> Any:
        """A compiled model with the layers and the name of the planned one, that runs by segments; the last is kept."""
        if self._last[0] != segments:
            self._empty(self._last[1])
            made = self.keras.Model(
                self.functional._inputs_struct, self.functional._outputs_struct, name=self.model.name
            )
            self._compile(made)
            made.__dict__["call"] = SegmentedCall(self.keras, self.functional, self.calls, segments, self.model)
            if self.parts > 1:
                made.__dict__["train_step"] = accumulating_step(self.keras, made, self.functional, self.parts)
            self._last = segments, made
        return self._last[1]

    def _compile(self, made: Any) -> None:
        compiled = self.model if getattr(self.model, "compiled", False) else None
        metrics = getattr(compiled, "_compile_metrics", None)
        measured: dict[str, Any] = {}
        if metrics is not None and self.measures:
            measured["metrics"] = _copied(self.keras, metrics._user_metrics)
            measured["weighted_metrics"] = _copied(self.keras, metrics._user_weighted_metrics)
        made.compile(
            optimizer=self._optimizer(compiled),
            loss=copy.copy(self.loss.given),
            loss_weights=copy.copy(self.loss.weights),
            jit_compile=False,
            run_eagerly=bool(getattr(compiled, "run_eagerly", False)),
            **measured,
        )
        made.optimizer.build(made.trainable_variables)

    def _takes_loss(self) -> bool:
        """Whether the compiled loss takes targets as large as it seems to ask for."""
        if self.loss.given is None:
            return False
        shape = {n: self.keras.KerasTensor(spec.shape, spec.dtype.name) for n, spec in self.facts.outputs.items()}
        output = self._output(shape)
        target = self.loss.targets(
            output, lambda one, size, whole: self.keras.KerasTensor(size, "int64" if whole else one.dtype)
        )
        try:
            self.keras.src.backend.compute_output_spec(self.loss.loss, output, target)
        except Exception:  # a loss of one's own may fail in any way
            return False
        return True

    def _optimizer(self, compiled: Any) -> Any:
        given = getattr(compiled, "optimizer", None)
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            if given is not None:
                return type(given).from_config(given.get_config())
        if self.state is not None and self.state < 2:
            return self.keras.optimizers.SGD(0.01, momentum=0.9 if self.state else 0.0)
        return self.keras.optimizers.Adam()

    def _structured(self, flat: Sequence[Any]) -> Any:
        """Inputs as the model takes them."""
        return self.keras.tree.pack_sequence_as(self.functional._inputs_struct, list(flat))

    def _targets(self, batch: int) -> Any:
        """Shapes and types of targets, in the structure of the outputs."""

        def spec(made: Any, shape: Sequence[int], whole: bool) -> Any:
            return self.tf.TensorSpec((batch, *shape[1:]), self.tf.int64 if whole else made.dtype)

        return self.loss.targets(self._output(self.facts.outputs), spec)

    def _output(self, values: dict[int, Any]) -> Any:
        """Numbered values in the structure in which the model returns them."""
        made = substitute(self.calls.result, lambda slot: values.get(slot.number))
        return made[0] if isinstance(made, (list, tuple)) and len(made) == 1 else made


def _copied(keras: Any, given: Any) -> Any:
    """Metrics without the state of those that were given; what cannot be copied is left out."""
    if isinstance(given, dict):
        return {name: _copied(keras, one) for name, one in given.items()}
    if isinstance(given, (list, tuple)):
        return [_copied(keras, one) for one in given]
    if isinstance(given, keras.metrics.Metric):
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            return type(given).from_config(given.get_config())
        return None
    return given
