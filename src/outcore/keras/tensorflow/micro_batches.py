"""``train_step`` over micro-batches, with the gradients of the whole batch.

The batch is split along its first dimension; every part runs forward and backward, and its gradients are added up,
weighted so that the sum is that of the whole batch: Keras' losses are means over the batch (``sum_over_batch_size``),
so a part counts by its share. The parts are the turns of a loop, one at a time. The optimizer steps once. The result is
that of the whole batch up to the order of sums, but for layers that normalize over the batch, which see one part at a
time and update their statistics once per part; and for dropout, whose masks are drawn per part.
"""

from __future__ import annotations

import importlib
from typing import Any

from outcore.errors import OutcoreError

__all__ = ["accumulating_step", "check_splittable", "fixed_batch", "normalizes_batches"]


def normalizes_batches(keras: Any, model: Any) -> bool:
    """Whether a layer that is trained takes statistics over the batch."""
    return any(isinstance(x, keras.layers.BatchNormalization) and x.trainable for x in model._flatten_layers())


def fixed_batch(model: Any, functional: Any) -> str:
    """Why a model takes batches of one size alone; empty if it does not."""
    sizes = [tensor.shape[0] for tensor in functional.inputs if tensor.shape[0] is not None]
    stateful = [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False) is True]
    if stateful:
        return f"{stateful[0]} is stateful and keeps a state for every sample of a batch"
    return f"its inputs are declared with a batch of {sizes[0]}" if sizes else ""


def check_splittable(keras: Any, model: Any, batch: int, parts: int) -> None:
    """Refuse what cannot be split into so many micro-batches."""
    if not 1 <= parts <= batch:
        raise OutcoreError(f"a batch of {batch} cannot be split into {parts} micro-batches")
    if type(model).train_step is not keras.Model.train_step:
        raise OutcoreError(f"{type(model).__name__} has a train_step of its own; split the batch there")


def accumulating_step(keras: Any, model: Any, parts: int) -> Any:
    """Keras' ``train_step``, over micro-batches."""
    tf = importlib.import_module("tensorflow")
    loss_module = importlib.import_module("keras.src.losses.loss")

    def train_step(data: Any) -> Any:
        _check_losses(keras, model)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        whole = tf.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
        count = tf.minimum(parts, whole)
        weights = model.trainable_weights

        def part(number: Any, total: list[Any], arrays: list[Any]) -> Any:
            start, stop = number * whole // count, (number + 1) * whole // count

            def rows(tree: Any) -> Any:
                return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], tree)

            given, wanted, weighed = rows(x), rows(y), rows(sample_weight)
            with tf.GradientTape() as tape:
                made = model(given, training=True)
                if any(keras.src.backend.get_keras_mask(leaf) is not None for leaf in keras.tree.flatten(made)):
                    raise OutcoreError(f"the outputs of {model.name} are masked, and a masked mean cannot be split")
                loss = model._compute_loss(x=given, y=wanted, y_pred=made, sample_weight=weighed, training=True)
                share = tf.cast(stop - start, loss.dtype) / tf.cast(whole, loss.dtype)
                whole_loss = loss_module.unscale_loss_for_distribution(loss)
                model._loss_tracker.update_state(whole_loss, sample_weight=stop - start)
                scaled = model.optimizer.scale_loss(loss * share)
            found = tape.gradient(scaled, [v.value for v in weights])
            total = [a if g is None else a + tf.convert_to_tensor(g) for a, g in zip(total, found, strict=True)]
            leaves = keras.tree.flatten(made)
            return number + 1, total, [array.write(number, leaf) for array, leaf in zip(arrays, leaves, strict=True)]

        _, total, arrays = tf.while_loop(
            lambda number, *_: number < count,
            part,
            (
                tf.constant(0),
                [tf.zeros(v.shape, v.dtype) for v in weights],
                [tf.TensorArray(out.dtype, size=count, infer_shape=False) for out in model.outputs],
            ),
            parallel_iterations=1,
        )
        model.optimizer.apply_gradients(zip(total, weights, strict=True))
        joined = [array.concat() for array in arrays]
        for tensor, out in zip(joined, model.outputs, strict=True):
            tensor.set_shape((None, *out.shape[1:]))
        made = keras.tree.pack_sequence_as(model.output, joined)
        return model.compute_metrics(x, y, made, sample_weight=sample_weight)

    return train_step


def _check_losses(keras: Any, model: Any) -> None:
    """Refuse losses that are no mean over the batch."""
    for loss in keras.tree.flatten(getattr(model._compile_loss, "_user_loss", None)):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean"):
            raise OutcoreError(
                f"a loss with reduction {reduction!r} is no mean over the batch; micro-batches need sum_over_batch_size"
            )
