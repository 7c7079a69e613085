"""Segments of a Keras model whose inner values TensorFlow does not keep.

The calls of a model are cut into segments. What a *recomputed* segment makes inside is dropped after forward; backward
runs the segment again from its inputs, and differentiates that run. `tf.recompute_grad` does the same for a function
without state. A Keras layer has state: a second run would update batch normalization twice and draw other dropout
masks. So a segment runs as a pure function, in Keras' `StatelessScope`: weights, statistics and seeds are arguments,
new statistics and seeds are results, which are assigned once, after the first run. The second run has the same
arguments, so it gives the same values bit for bit; gradients from several segments are added in another order.

In a graph the second run must wait for the gradient of the segment's output. Its arguments pass an identity that has
this gradient as a control input; that also keeps the graph's optimizer from merging both runs. And it must wait for all
gradients of the segments behind it: gradients of kernels are slow, nothing else needs them soon, and while one thread
computes them another would run the next segment again, with what both hold in memory. So a segment that is *kept*
between recomputed ones is a function with a gradient of its own too, that of its first run.

Masks that Keras attaches to tensors are carried in and out beside them. What is not a dense tensor, and layers that add
losses of their own, stay in segments that are kept.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from outcore.keras.tensorflow.calls import Calls, OrderedCall, run_call

__all__ = ["Segment", "SegmentedCall"]


@dataclass(frozen=True)
class Segment:
    """The calls from `start` up to `stop`; run again in backward, or kept as TensorFlow keeps them."""

    start: int
    stop: int
    recompute: bool = False
    ordered: bool = False
    """Whether, kept, its gradients are all made before backward goes on with the segment in front of it."""


class _Boundary:
    """What a segment takes from before and gives to what comes after, worked out once."""

    def __init__(self, calls: Calls, segment: Segment, last: dict[int, int]) -> None:
        part = calls.calls[segment.start : segment.stop]
        made = {number for call in part for number in call.outputs}
        self.part = part
        self.inputs = tuple(dict.fromkeys(n for call in part for n in call.inputs if n not in made))
        self.outputs = tuple(n for call in part for n in call.outputs if last[n] >= segment.stop)
        self.dead = tuple(n for n in (*self.inputs, *self.outputs) if last[n] < segment.stop)
        unique = {id(v): v for call in part for v in call.variables}
        self.trainable = [v for v in unique.values() if v.trainable]
        self.state = [v for v in unique.values() if not v.trainable]


@contextmanager
def _outside_scopes() -> Iterator[None]:
    """A context that no scope of automatic casts is around."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    around = state.get_global_attribute("autocast_scope")
    state.set_global_attribute("autocast_scope", None)
    try:
        yield
    finally:
        state.set_global_attribute("autocast_scope", around)


class SegmentedCall(OrderedCall):
    """The ``call`` of a Keras model that runs by segments; takes its place on the instance."""

    def __init__(
        self, keras: Any, functional: Any, calls: Calls, segments: Sequence[Segment], model: Any = None
    ) -> None:
        super().__init__(keras, functional, calls, model)
        self.segments = tuple(segments)
        self.tf = importlib.import_module("tensorflow")
        self._record = importlib.import_module("tensorflow.python.eager.record")
        self._boundaries: dict[Any, _Boundary] = {}
        self.plan: Any = None
        self._done: list[Any] = []
        """The gradients of the segment that was differentiated last, in the graph that is being traced."""

    def run(self, values: dict[int, Any], training: Any) -> None:
        """All segments over numbered values."""
        trains = self.recorded() if training is None else training
        for segment in self.segments:
            boundary = self.boundary(segment)
            dense = all(isinstance(values[n], self.tf.Tensor) for n in boundary.inputs)
            ordered = segment.ordered and not self.tf.executing_eagerly()  # eagerly, all is in order
            if (segment.recompute or ordered) and trains and dense:
                self.run_pure(boundary, values, training, segment.recompute)
                for number in [n for n in values if self.last.get(n, -1) < segment.stop]:
                    del values[number]
            else:
                self.run_range(segment.start, segment.stop, values, training)

    def recorded(self) -> bool:
        """Whether a tape is open."""
        return bool(self._record.could_possibly_record())

    def boundary(self, segment: Segment) -> _Boundary:
        """The boundary of a segment under the variables that are trainable now."""
        part = self.calls.calls[segment.start : segment.stop]
        key = segment.start, segment.stop, tuple(v.trainable for call in part for v in call.variables)
        if key not in self._boundaries:
            self._boundaries[key] = _Boundary(self.calls, segment, self.last)
        return self._boundaries[key]

    def run_pure(self, boundary: _Boundary, values: dict[int, Any], training: Any, again: bool) -> None:
        """Run a segment as a function with a gradient of its own, for which it may run again."""
        tf, backend = self.tf, self.keras.src.backend
        numbers = boundary.inputs
        masks = [backend.get_keras_mask(values[n]) for n in numbers]
        masked = [n for n, m in zip(numbers, masks, strict=True) if m is not None]
        with backend.AutocastScope(None):
            state = [tf.convert_to_tensor(v.value) for v in boundary.state]
            weights = [tf.convert_to_tensor(v.value) for v in boundary.trainable]
        flat = [*(values[n] for n in numbers), *(m for m in masks if m is not None), *state, *weights]
        variables = [*boundary.state, *boundary.trainable]
        after: dict[str, Any] = {}

        def pure(arguments: Sequence[Any]) -> list[Any]:
            """The segment as a function of all that it reads."""
            inner = dict(zip(numbers, arguments, strict=False))
            for number, m in zip(masked, arguments[len(numbers) :], strict=False):
                backend.set_keras_mask(inner[number], m)
            given = arguments[len(numbers) + len(masked) :]
            mapping = list(zip(variables, given, strict=True))
            stateless = self.keras.StatelessScope
            # What is around the model in mixed precision is not there when it runs again: variables would be given and
            # taken for changed in the type that they are computed in. Layers open a scope of their own; inside one
            # that casts nothing they would open one in every policy, and compute otherwise than plain Keras.
            with _outside_scopes(), stateless(state_mapping=mapping, initialize_variables=False) as scope:
                note = scope.add_update  # as of a variable, no gradient goes through what was assigned
                scope.add_update = lambda update: note((update[0], tf.stop_gradient(update[1])))
                for call in boundary.part:
                    run_call(call, inner, training)
                new = [(v, scope.get_current_value(v)) for v in boundary.state]
            out_masks = [(n, backend.get_keras_mask(inner[n])) for n in boundary.outputs]
            before = {id(v): t for v, t in mapping}
            updated = [(v, t) for v, t in new if t is not before[id(v)]]
            after["masks"] = [n for n, m in out_masks if m is not None]
            after["updated"] = [v for v, _ in updated]
            tensors = [inner[n] for n in boundary.outputs]
            return [*tensors, *(m for _, m in out_masks if m is not None), *(t for _, t in updated)]

        data = len(flat) - len(weights) - len(state)
        make = recomputed if again else in_order
        found = make(tf, self._record, pure, flat, data, len(state), self._done)
        outputs = dict(zip(boundary.outputs, found, strict=False))
        for number, m in zip(after["masks"], found[len(outputs) :], strict=False):
            backend.set_keras_mask(outputs[number], m)
        for variable, new_value in zip(after["updated"], found[len(outputs) + len(after["masks"]) :], strict=True):
            variable.assign(new_value)
        values.update(outputs)


def recomputed(tf: Any, record: Any, pure: Any, flat: list[Any], data: int, state: int, done: list[Any]) -> list[Any]:
    """The results of a pure function, whose gradient runs it again.

    Args:
        tf: TensorFlow.
        record: its module that knows what tapes watch.
        pure: from a list of tensors to a list of tensors.
        flat: its arguments.
        data: so many of them are values and masks.
        state: so many after these have no gradient.
        done: the gradients that were made last; in a graph the second run waits for them, so that what the segment
            behind this one holds is freed first.
    """
    wanted = _wanted(record, flat, data, state)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*arguments: Any) -> Any:
        eager = tf.executing_eagerly()
        with record.stop_recording() if eager else nullcontext():  # a tape would keep all of the segment until backward
            results = pure(arguments)

        def backward(*gradients: Any) -> list[Any]:
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            earlier = [t for t in done if t.graph is graph] if graph is not None else []
            with tf.control_dependencies([*(g for g in gradients if g is not None), *earlier]):
                again = [tf.identity(t) for t in arguments]
            sources = [t for t, want in zip(again, wanted, strict=True) if want]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                anew = pure(again)
            pairs = [(t, g) for t, g in zip(anew, gradients, strict=True) if g is not None and t.dtype.is_floating]
            found = tape.gradient([t for t, _ in pairs], sources, [g for _, g in pairs])
            done[:] = [tf.convert_to_tensor(g) for g in found if g is not None] if graph is not None else []
            rest = iter(found)
            return [next(rest) if want else None for want in wanted]

        return results, backward

    found = run(*flat)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def in_order(tf: Any, record: Any, pure: Any, flat: list[Any], data: int, state: int, done: list[Any]) -> list[Any]:
    """The results of a pure function in a graph, whose gradient waits for those that were made last.

    The arguments are those of `recomputed`. Nothing is run again.
    """
    wanted = _wanted(record, flat, data, state)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*arguments: Any) -> Any:
        sources = [t for t, want in zip(arguments, wanted, strict=True) if want]
        with tf.GradientTape(watch_accessed_variables=False, persistent=True) as tape:
            tape.watch(sources)
            results = pure(arguments)

        def backward(*gradients: Any) -> list[Any]:
            graph = tf.compat.v1.get_default_graph()
            with tf.control_dependencies([t for t in done if t.graph is graph]):
                given = [None if g is None else tf.identity(g) for g in gradients]
            pairs = [(t, g) for t, g in zip(results, given, strict=True) if g is not None and t.dtype.is_floating]
            found = tape.gradient([t for t, _ in pairs], sources, [g for _, g in pairs])
            done[:] = [tf.convert_to_tensor(g) for g in found if g is not None]
            rest = iter(found)
            return [next(rest) if want else None for want in wanted]

        return results, backward

    found = run(*flat)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _wanted(record: Any, flat: list[Any], data: int, state: int) -> list[bool]:
    """Which arguments have gradients: numbers that are watched, and no state."""
    floating = [t.dtype.is_floating and not data <= place < data + state for place, t in enumerate(flat)]
    watched = [bool(record.should_record_backprop([t])) for t in flat]
    return [a and b for a, b in zip(floating, watched, strict=True)] if any(watched) else floating
