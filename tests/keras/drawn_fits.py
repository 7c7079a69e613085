"""Programs with ``fit`` drawn at random: under `outcore.within` against plain Keras; prints a JSON line per program.

    KERAS_BACKEND=torch python -m tests.keras.drawn_fits FIRST LAST

A program is a model (`drawn_models`, or with masks and dropout `random_models`; functional, nested, or as a class) and
what a user says to ``compile`` and ``fit``: optimizers, losses and metrics for each output, weights of samples, frozen
layers, regularizers, losses and steps of one's own, mixed precision, validation, callbacks, and data in every form.
It is run twice from one seed. Compared are the history, all variables, those of the optimizer, `evaluate` and
`predict`. On TensorFlow the model runs by random segments, or in micro-batches; on torch within a budget. A program
that plain Keras refuses is not counted; one that outcore refuses has its sentence in the row.
"""

from __future__ import annotations

import json
import sys
import warnings
from itertools import pairwise
from typing import Any

import numpy as np

import outcore
import outcore.keras
from outcore.errors import OutcoreError, PlanError
from outcore.keras.installed import require_keras
from tests.keras.drawn_models import drawn_model
from tests.keras.random_models import random_model

keras = require_keras()
L, K = keras.layers, keras.ops
TORCH = keras.backend.backend() == "torch"
BATCH, SAMPLES = 3, 8
"""The last batch of an epoch is smaller than the others."""
ROUNDING = {"float64": 1e-9, "float32": 2e-3, "mixed_float16": 0.1, "mixed_bfloat16": 0.2}


class Penalty(L.Layer):
    """Adds a loss of its own."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * K.mean(K.square(x)))
        return x


class Wrapped(keras.Model):
    """A model inside of a class, with what it returns changed a little."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x: Any, training: bool | None = None) -> Any:
        return keras.tree.map_structure(lambda one: one * self.scale, self.inner(x))


class Counted(keras.metrics.Metric):
    """A metric of one's own, with a state."""

    def __init__(self, name: str = "counted") -> None:
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(K.cast(K.sum(K.abs(K.cast(y_pred, "float32"))), self.total.dtype))

    def result(self) -> Any:
        return self.total


def stepped(base: type) -> type:
    """A model with a training step of its own, as Keras' guides write it."""

    class Stepped(base):  # type: ignore[misc,valid-type]
        def train_step(self, data: Any) -> Any:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            if TORCH:
                import torch

                self.zero_grad()
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True), sample_weight=weight)
                loss.backward()
                with torch.no_grad():
                    self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            else:
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True), sample_weight=weight)
                self.optimizer.apply_gradients(
                    zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
                )
            return {"loss": loss}

    return Stepped


class Program:
    """One program, the same for the same seed; `run` may be called twice."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = np.random.default_rng(seed + 10_000)
        p = self.pick
        self.policy = p(*["float64"] * 6, "float32", "mixed_float16", "mixed_bfloat16")
        self.kind = p("drawn", "drawn", "random")
        self.form = p("functional", "functional", "nested", "class", "step", "penalty")
        self.optimizer = p("sgd", "momentum", "adam", "clipped", "ema", "accumulating", "schedule", "adamw")
        self.loss = p("mse", "mae", "huber", "function", "list", "bce", "weights")
        self.metrics = p(None, "mae", "own", "weighted")
        self.weighed = p(None, None, "samples")
        self.data = p("numpy", "numpy", "tf.data", "dataset", "generator", "torch")
        self.validated = p(None, "split", "data")
        self.frozen = self.random.random() < 0.25
        self.regularized = self.random.random() < 0.25
        self.eager = self.random.random() < 0.2
        self.together = 1 if TORCH else p(1, 1, 2)
        self.compiled_before = self.random.random() < 0.6
        self.calls_back = p(None, None, "rate", "early", "batches", "trainable")
        self.parts = 1 if TORCH else p(1, 1, 1, 2, 3)
        self.budget = p("90%", "80%", "70%")

    def pick(self, *options: Any) -> Any:
        return options[int(self.random.integers(len(options)))]

    def facts(self) -> dict[str, Any]:
        shown = {k: v for k, v in vars(self).items() if isinstance(v, (str, int, bool)) and k != "random"}
        return {k: v for k, v in shown.items() if v}

    def model(self) -> tuple[Any, list[Any]]:
        keras.config.set_floatx("float64" if self.policy == "float64" else "float32")
        keras.config.set_dtype_policy(self.policy)
        model, inputs = (drawn_model if self.kind == "drawn" else random_model)(keras, self.seed)
        reps = -(-SAMPLES // len(inputs[0]))
        random = np.random.default_rng(self.seed)
        inputs = [np.concatenate([x] * reps)[:SAMPLES] for x in inputs]
        inputs = [x if x.dtype.kind == "i" else x + 0.1 * random.standard_normal(x.shape) for x in inputs]
        wide = np.float64 if self.policy == "float64" else np.float32
        inputs = [x if x.dtype.kind == "i" else x.astype(wide) for x in inputs]
        if self.form == "penalty":
            outputs = keras.tree.map_structure(lambda one: Penalty()(one), model.output)
            model = keras.Model(model.input, outputs)
        elif self.form == "nested":
            given = keras.tree.map_structure(lambda x: keras.Input(x.shape[1:], dtype=x.dtype), model.input)
            model = keras.Model(given, keras.tree.map_structure(lambda x: x * 1.5, model(given)))
        elif self.form == "class":
            model = Wrapped(model)
        elif self.form == "step":
            model = stepped(keras.Model)(model.input, model.output)
        keras.utils.set_random_seed(self.seed)
        if self.form == "class":
            model(self._given([x[:BATCH] for x in inputs]))
        layers = [x for x in model._flatten_layers() if x.trainable_weights and not getattr(x, "layers", None)]
        if self.frozen:
            for layer in layers[::3]:
                layer.trainable = False
        if self.regularized:
            for layer in layers[::2]:
                for variable in layer.trainable_weights[:1]:
                    variable.regularizer = keras.regularizers.L2(0.01)
        return model, inputs

    def _given(self, inputs: list[Any]) -> Any:
        return inputs if len(inputs) > 1 else inputs[0]

    def compile(self, model: Any, count: int) -> None:
        o = keras.optimizers
        optimizer = {
            "sgd": lambda: o.SGD(0.02),
            "momentum": lambda: o.SGD(0.02, momentum=0.9, nesterov=True),
            "adam": lambda: o.Adam(0.01),
            "clipped": lambda: o.Adam(0.01, global_clipnorm=0.5),
            "ema": lambda: o.SGD(0.02, use_ema=True, ema_overwrite_frequency=2),
            "accumulating": lambda: o.Adam(0.01, gradient_accumulation_steps=2),
            "schedule": lambda: o.SGD(o.schedules.ExponentialDecay(0.05, 2, 0.7)),
            "adamw": lambda: o.AdamW(0.01, clipvalue=0.3),
        }[self.optimizer]()

        def own(y: Any, z: Any) -> Any:
            return K.mean(K.log(K.cosh(K.clip(K.cast(y, z.dtype) - z, -5, 5))), axis=-1)

        loss: Any = {
            "mse": "mse",
            "mae": keras.losses.MeanAbsoluteError(),
            "huber": keras.losses.Huber(0.5),
            "function": own,
            "bce": keras.losses.BinaryCrossentropy(from_logits=True),
            "list": ["mse"] * count,
            "weights": ["mse"] * count,
        }[self.loss]
        weights = [0.3, 1.0, 0.5][:count] if self.loss == "weights" and count > 1 else None
        if count > 1 and not isinstance(loss, list):
            loss = [loss] * count
        if isinstance(getattr(model, "output", None), dict) or isinstance(self._shape, dict):
            names = sorted(self._shape)
            loss = dict(zip(names, loss if isinstance(loss, list) else [loss], strict=True))
            weights = None if weights is None else dict(zip(names, weights, strict=True))
        elif count == 1 and isinstance(loss, list):
            loss = loss[0]
        more: dict[str, Any] = {}
        if self.metrics == "weighted":
            more["weighted_metrics"] = ["mae"] if count == 1 else self._each(lambda: ["mae"])
        elif self.metrics:
            make = (lambda: ["mae"]) if self.metrics == "mae" else (lambda: [Counted()])
            more["metrics"] = make() if count == 1 else self._each(make)
        model.compile(
            optimizer, loss, loss_weights=weights, run_eagerly=self.eager, jit_compile=False,
            steps_per_execution=self.together, **more,
        )  # fmt: skip

    def _each(self, make: Any) -> Any:
        return (
            {name: make() for name in self._shape} if isinstance(self._shape, dict) else [make() for _ in self._shape]
        )

    def fit(self, model: Any, inputs: list[Any], targets: Any, count: int) -> Any:
        x: Any = self._given(inputs)
        weight: Any = None
        random = np.random.default_rng(self.seed + 1)
        if self.weighed == "samples":
            drawn = random.uniform(0.0, 2.0, SAMPLES).astype("float32")
            weight = keras.tree.map_structure(lambda y: drawn.reshape(-1, *[1] * (y.ndim - 2)), targets)
        back = []
        if self.calls_back == "rate":
            back = [keras.callbacks.LearningRateScheduler(lambda epoch, rate: float(rate) * 0.5)]
        elif self.calls_back == "early":
            back = [keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True)]
        elif self.calls_back == "batches":
            seen: list[float] = []
            back = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))]
        more: dict[str, Any] = {"callbacks": back}
        if self.validated == "data":
            more["validation_data"] = (x, targets)
        elif self.validated == "split" and self.data == "numpy":
            more["validation_split"] = 0.25
        how = {"epochs": 2, "verbose": 0, **more}
        one = [x, targets] if weight is None else [x, targets, weight]

        def rows(start: int) -> Any:
            return tuple(keras.tree.map_structure(lambda a: a[start : start + BATCH], tuple(one)))

        keras.utils.set_random_seed(self.seed + 2)
        if self.data == "numpy":
            return model.fit(x, targets, sample_weight=weight, batch_size=BATCH, **how)
        if self.data == "tf.data" and not TORCH:
            import tensorflow as tf

            return model.fit(tf.data.Dataset.from_tensor_slices(_tuples(tuple(one))).batch(BATCH).prefetch(1), **how)
        if self.data == "torch":
            import torch

            flat = [torch.from_numpy(a) for a in keras.tree.flatten(tuple(one))]
            shape = tuple(one)

            class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
                def __len__(self) -> int:
                    return SAMPLES

                def __getitem__(self, n: int) -> Any:
                    return _tuples(keras.tree.pack_sequence_as(shape, [a[n] for a in flat]))

            return model.fit(torch.utils.data.DataLoader(Rows(), batch_size=BATCH), **how)
        if self.data == "dataset":

            class Batches(keras.utils.PyDataset):  # type: ignore[misc]
                def __len__(self) -> int:
                    return -(-SAMPLES // BATCH)

                def __getitem__(self, n: int) -> Any:
                    return rows(n * BATCH)

            return model.fit(Batches(), **how)

        def endless() -> Any:
            while True:
                for start in range(0, SAMPLES, BATCH):
                    yield _tuples(rows(start))

        return model.fit(endless(), steps_per_epoch=3, **how)

    def run(self, managed: bool) -> dict[str, Any]:
        model, inputs = self.model()
        given = self._given([x[:BATCH] for x in inputs])
        outputs = keras.tree.map_structure(lambda one: np.zeros(tuple(one.shape)), model(given, training=False))
        self._shape = outputs
        count = len(keras.tree.flatten(outputs))
        random = np.random.default_rng(self.seed + 3)
        targets = keras.tree.map_structure(
            lambda one: random.uniform(0, 1, (SAMPLES, *one.shape[1:])).astype("float32"), outputs
        )
        if self.compiled_before or not managed:
            self.compile(model, count)
        if managed:
            keras.utils.set_random_seed(self.seed + 4)
            self.manage(model, given)
            if not self.compiled_before:
                self.compile(model, count)
        history = self.fit(model, inputs, targets, count).history
        if self.calls_back == "trainable":  # frozen afterwards, and trained again
            model.layers[-1].trainable = False
            self.compile(model, count)
            again = self.fit(model, inputs, targets, count).history
            history = history | {f"again {name}": values for name, values in again.items()}
        x = self._given(inputs)
        state = [np.array(keras.ops.convert_to_numpy(v), "float64") for v in model.variables]
        kept = [np.array(keras.ops.convert_to_numpy(v), "float64") for v in model.optimizer.variables]
        return {
            "history": [np.array(values, "float64") for _, values in sorted(history.items())],
            "variables": state,
            "optimizer": kept,
            "evaluate": [np.array(v, "float64") for v in np.atleast_1d(model.evaluate(x, targets, verbose=0))],
            "predict": [np.array(v, "float64") for v in keras.tree.flatten(model.predict(x, verbose=0))],
            "names": sorted(history),
        }

    def manage(self, model: Any, given: Any) -> None:
        if TORCH:
            within_some(model, given, (self.budget, "96%", "300%"))
            return
        if not _same_in_parts(model):
            self.parts = 1
        if self.parts > 1:
            shapes = [x.shape for x in keras.tree.flatten(given)]
            outcore.keras.within(model, shapes, memory=None, micro_batches=self.parts, quiet=True)
        segmented(model, given, np.random.default_rng(self.seed + 5), self.parts)


def _same_in_parts(model: Any) -> bool:
    """Whether a batch in parts is the same training: nothing is drawn, and nothing normalizes over the batch."""
    drawn = any("seed_generator" in variable.path for variable in model.non_trainable_variables)
    return not drawn and not any(isinstance(one, L.BatchNormalization) for one in model._flatten_layers())


def within_some(model: Any, given: Any, budgets: tuple[str, ...]) -> None:
    """On torch, within the first of some budgets that is not refused."""
    example = keras.tree.map_structure(keras.ops.convert_to_tensor, given)
    for budget in budgets:
        try:
            outcore.within(model, (example,), memory=budget, quiet=True, measure_s=0.05, stream=False)
            return
        except PlanError:
            continue
    raise OutcoreError("no budget")


def segmented(model: Any, given: Any, random: Any, parts: int) -> None:
    """Put random segments on a model: run again, kept, and kept in order."""
    from outcore.keras.tensorflow import planned
    from outcore.keras.tensorflow.calls import list_calls, traced_functional
    from outcore.keras.tensorflow.plan import Choice
    from outcore.keras.tensorflow.segments import Segment, SegmentedCall
    from outcore.keras.tensorflow.traced import step_facts

    functional = traced_functional(keras, model)
    calls = list_calls(keras, model, functional)
    number = len(calls.calls)
    places = sorted(random.choice(range(1, number), min(number - 1, 5), replace=False).tolist()) if number > 1 else []
    shapes = [tuple(x.shape) for x in keras.tree.flatten(given)]
    facts = step_facts(keras, model, planned._specs(model, functional, shapes), calls)
    pure = [call.pure for call in facts.calls]
    segments = []
    for a, b in pairwise([0, *places, number]):
        fine = all(pure[a:b])
        again = fine and random.random() < 0.7
        segments.append(Segment(a, b, again, fine and not again and random.random() < 0.5))
    plan = planned._plan(calls, Choice(tuple(segments), 0.0, 0), parts, 0, 0, None)
    planned._install(keras, model, SegmentedCall(keras, functional, calls, segments, model), plan)


def _tuples(tree: Any) -> Any:
    """Lists as tuples, which data sets of TensorFlow do not take for tensors."""
    if isinstance(tree, (list, tuple)):
        return tuple(_tuples(one) for one in tree)
    return {k: _tuples(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def difference(want: list[Any], have: list[Any]) -> float:
    """The largest difference, over the largest value of its array where that is above one."""
    worst = 0.0
    for a, b in zip(want, have, strict=True):
        if a.shape != b.shape:
            return float("inf")
        bad = ~np.isfinite(a)
        if not np.array_equal(bad, ~np.isfinite(b)):
            return float("inf")
        a, b = np.where(bad, 0, a), np.where(bad, 0, b)
        worst = max(worst, float(np.abs(a - b).max(initial=0)) / max(1.0, float(np.abs(a).max(initial=0))))
    return worst


def compare(seed: int) -> dict[str, Any]:
    """How far a program is from itself without outcore."""
    program = Program(seed)
    row: dict[str, Any] = {"seed": seed} | program.facts()
    try:
        want = program.run(False)
    except Exception as error:  # plain Keras does not take it
        return row | {"plain": f"{type(error).__name__}: {error}"[:300]}
    keras.backend.clear_session()  # layers are numbered anew
    try:
        have = Program(seed).run(True)
    except OutcoreError as error:
        return row | {"refused": str(error)[:400]}
    except Exception as error:
        import traceback

        return row | {"failed": f"{type(error).__name__}: {error}"[:600], "where": traceback.format_exc()[-1500:]}
    want_names, have_names = want.pop("names"), have.pop("names")
    if want_names != have_names:
        return row | {"differs": f"history: {want_names}, {have_names}"}
    found = {kind: difference(want[kind], have[kind]) for kind in want}
    allowed = ROUNDING[program.policy]
    row["found"] = {kind: value for kind, value in found.items() if value}
    return row | ({} if max(found.values()) <= allowed else {"differs": f"{max(found.values()):.1e}"})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(compare(number)), flush=True)
        keras.backend.clear_session()
