"""``train_step`` over micro-batches, with the gradients of the whole batch.

The batch is split along its first dimension; every part runs forward and backward, and its gradients are added up,
weighted so that the sum is that of the whole batch: Keras' losses are means over the batch (``sum_over_batch_size``),
so a part counts by its share. The parts are the turns of a loop, one at a time. The optimizer steps once. The result is
that of the whole batch up to the order of sums, but for layers that normalize over the batch, which see one part at a
time and update their statistics once per part; and for dropout, whose masks are drawn per part.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from outcore.errors import OutcoreError

__all__ = ["accumulating_step", "check_splittable", "fixed_batch"]

_ROUNDING = 1e-3
_PARTS = slice(0, None), slice(0, 1), slice(1, None)


def fixed_batch(model: Any, functional: Any) -> str:
    """Why a model takes batches of one size alone; empty if it does not."""
    sizes = [tensor.shape[0] for tensor in functional.inputs if tensor.shape[0] is not None]
    stateful = [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False) is True]
    if stateful:
        return f"{stateful[0]} is stateful and keeps a state for every sample of a batch"
    return f"its inputs are declared with a batch of {sizes[0]}" if sizes else ""


def check_splittable(keras: Any, model: Any, functional: Any, specs: Sequence[Any], parts: int) -> None:
    """Refuse what cannot be split into so many micro-batches.

    Args:
        keras: the module.
        model: not under a plan.
        functional: the functional model in it.
        specs: shapes and types of a batch.
        parts: into how many.
    """
    batch = specs[0].shape[0]
    if not 1 <= parts <= batch:
        raise OutcoreError(f"a batch of {batch} cannot be split into {parts} micro-batches")
    if type(model).train_step is not keras.Model.train_step:
        raise OutcoreError(f"{type(model).__name__} has a train_step of its own; split the batch there")
    if type(model).compute_loss is not keras.Model.compute_loss:
        raise OutcoreError(
            f"{type(model).__name__} has a compute_loss of its own, which may be no mean over the batch; split the "
            "batch in a train_step of your own"
        )
    if _mixes_samples(keras, model, functional, specs):
        raise OutcoreError(
            f"what {model.name} makes of a sample depends on the other samples of its batch (seen on random numbers, "
            "in evaluation); it cannot take micro-batches"
        )


def _mixes_samples(keras: Any, model: Any, functional: Any, specs: Sequence[Any]) -> bool:
    """Whether an output of a sample, in evaluation, changes with the others of its batch."""
    tf, random = importlib.import_module("tensorflow"), np.random.default_rng(0)
    if any(spec.dtype == tf.string for spec in specs):
        return False
    drawn = [
        random.uniform(-1, 1, (4, *spec.shape[1:]))
        if spec.dtype.is_floating
        else random.integers(0, 2, (4, *spec.shape[1:]))
        for spec in specs
    ]
    made = []
    for rows in (slice(0, 4), slice(0, 1)):
        flat = [tf.constant(x[rows], spec.dtype) for x, spec in zip(drawn, specs, strict=True)]
        given = keras.tree.pack_sequence_as(functional._inputs_struct, flat)
        outputs = keras.tree.flatten(model(given, training=False))
        made.append([keras.ops.convert_to_numpy(out)[:1].astype("float64") for out in outputs])
    scale = [max(1e-6, float(np.abs(out).max(initial=0))) for out in made[0]]
    return any(float(np.abs(a - b).max(initial=0)) > 0.01 * s for a, b, s in zip(*made, scale, strict=True))


def accumulating_step(keras: Any, model: Any, functional: Any, parts: int) -> Any:
    """Keras' ``train_step`` of a model over micro-batches; what it returns is known from the functional model in it."""
    tf = importlib.import_module("tensorflow")
    loss_module = importlib.import_module("keras.src.losses.loss")

    def train_step(data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
        whole = tf.shape(first)[0]
        count = tf.minimum(parts, whole)
        weights = model.trainable_weights
        reached = [False] * len(weights)

        def part(number: Any, total: list[Any], arrays: list[Any]) -> Any:
            start, stop = number * whole // count, (number + 1) * whole // count

            given, wanted, weighed = _rows(keras, (x, y, sample_weight), slice(start, stop))
            with tf.GradientTape() as tape:
                made = model(given, training=True)
                if any(keras.src.backend.get_keras_mask(leaf) is not None for leaf in keras.tree.flatten(made)):
                    raise OutcoreError(f"the outputs of {model.name} are masked, and a masked mean cannot be split")
                _check_losses(keras, model, wanted, made, weighed)
                losses = _of_each_output(tf, model)
                loss = model._compute_loss(x=given, y=wanted, y_pred=made, sample_weight=weighed, training=True)
                share = tf.cast(stop - start, loss.dtype) / tf.cast(whole, loss.dtype)
                if keras.tree.flatten(made)[0].shape[0] is None:  # Keras then counts a part as much as a batch
                    for variable, before in losses:
                        added = tf.cast(share * (first.shape[0] or 1), before.dtype) * (variable.value - before)
                        variable.assign(before + added)
                whole_loss = loss_module.unscale_loss_for_distribution(loss)
                model._loss_tracker.update_state(whole_loss, sample_weight=stop - start)
                scaled = model.optimizer.scale_loss(loss * share)
            found = tape.gradient(scaled, [v.value for v in weights])
            _check_rows(tf, model, found)
            reached[:] = [g is not None for g in found]
            total = [a if g is None else a + tf.convert_to_tensor(g) for a, g in zip(total, found, strict=True)]
            leaves = keras.tree.flatten(made)
            return number + 1, total, [array.write(number, leaf) for array, leaf in zip(arrays, leaves, strict=True)]

        _, total, arrays = tf.while_loop(
            lambda number, *_: number < count,
            part,
            (
                tf.constant(0),
                [tf.zeros(v.shape, v.dtype) for v in weights],
                [tf.TensorArray(out.dtype, size=count, infer_shape=False) for out in functional.outputs],
            ),
            parallel_iterations=1,
        )
        gradients = [g if known else None for g, known in zip(total, reached, strict=True)]
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        joined = [array.concat() for array in arrays]
        for tensor, out in zip(joined, functional.outputs, strict=True):
            tensor.set_shape((None, *out.shape[1:]))
        made = keras.tree.pack_sequence_as(functional.output, joined)
        return model.compute_metrics(x, y, made, sample_weight=sample_weight)

    return train_step


def _check_rows(tf: Any, model: Any, gradients: Sequence[Any]) -> None:
    """Refuse gradients of the rows of a table: Keras squares every reading of a row by itself, and here they are added
    up before an optimizer sees them."""
    rows = [v.path for v, g in zip(model.trainable_weights, gradients, strict=True) if isinstance(g, tf.IndexedSlices)]
    plain = type(model.optimizer).__name__ == "SGD" and not model.optimizer.momentum
    if rows and not plain:
        raise OutcoreError(
            f"{type(model.optimizer).__name__} squares the gradient of every reading of a row of {rows[0]} by itself; "
            f"{model.name} cannot take micro-batches, whose gradients are added up before"
        )


def _of_each_output(tf: Any, model: Any) -> list[tuple[Any, Any]]:
    """The variables of the means that Keras shows as losses of single outputs, with their values."""
    metrics = [] if model._compile_loss is None else model._compile_loss.metrics
    return [(v, tf.convert_to_tensor(v.value)) for metric in metrics for v in metric.variables]


def _rows(keras: Any, trees: Sequence[Any], part: slice) -> list[Any]:
    """Some samples of every structure."""
    return [keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[part], tree) for tree in trees]


def _check_losses(keras: Any, model: Any, *given: Any) -> None:
    """Refuse a loss that is no mean over the samples of a batch, by random targets, outputs and weights like the given.

    Whether it is one cannot be read off: a Dice loss is a ratio of sums over the batch, an ignored class leaves a mean
    over the others, and a function of the user's returns what it likes.
    """
    for layer in model._flatten_layers():
        if layer._losses and getattr(layer, "activity_regularizer", None) is None:  # which Keras divides by the batch
            raise OutcoreError(
                f"{layer.path} adds a loss of its own, which may be no mean over the batch; "
                f"{model.name} cannot take micro-batches"
            )
    loss = model._compile_loss
    if loss is None:
        return
    tf, random = importlib.import_module("tensorflow"), np.random.default_rng(0)
    share = np.array([0.9, 0.1, 0.5, 0.3])  # samples that differ: of a ratio, the parts then differ, too
    known = [d for leaf in keras.tree.flatten(given[1]) for d in leaf.shape[-1:] if d]
    ignored = [one.ignore_class for one in keras.tree.flatten(loss._user_loss) if _ignores(one)]

    def drawn(leaf: Any) -> Any:
        if leaf is None:
            return None
        shape = (len(share), *(4 if n is None else n for n in leaf.shape[1:]))
        if leaf.dtype.is_floating:
            made = random.uniform(0.05, 0.95, shape) * share.reshape(-1, *[1] * (len(shape) - 1))
        else:
            made = random.integers(0, min(known, default=2), shape)
            made[0] = ignored[0] if ignored else made[0]
        return tf.constant(made.astype(leaf.dtype.as_numpy_dtype))

    with tf.init_scope():
        trees = [keras.tree.map_structure(drawn, tree) for tree in given]
        if not loss.built:  # it makes its metrics, which would have no value yet if they were made in the traced step
            loss(*trees)
            for metric in loss.metrics:
                metric.reset_state()
        with keras.StatelessScope():
            whole, first, rest = (float(loss(*_rows(keras, trees, part))) for part in _PARTS)
    if abs(whole - first / len(share) - rest * (1 - 1 / len(share))) > _ROUNDING * max(1.0, abs(whole)):
        raise OutcoreError(
            f"the loss that {model.name} is compiled with is no mean over the samples of a batch (of random numbers it "
            f"is {whole:.4g}, of their parts {first:.4g} and {rest:.4g}); it cannot take micro-batches"
        )


def _ignores(loss: Any) -> bool:
    return getattr(loss, "ignore_class", None) is not None
