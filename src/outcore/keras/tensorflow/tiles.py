"""A Keras model on TensorFlow, run tile by tile, with the gradients of the whole image.

The calls that have a rule (`tile_rules`) and whose inputs have one are the streamed part; what leaves it (the last
feature map of a classifier, the output of a U-Net) is the *boundary*. The boundary is cut into disjoint tiles. For
each, the regions of all values before it follow by interval arithmetic, the layers run on just these, and the tile is
written into the boundary map, which the rest of the model takes as ever. Backward runs each tile again, with the
gradient of that tile alone, and adds up: exact, because a sum of gradients over disjoint parts of the output is the
gradient.

Nothing of a tile outlives it, so a step holds the image, the boundary map with its gradient, and one tile. Tiles that
are alike but for their place share one traced function: nine cover most images.

Exact is: convolution, pooling, normalization with fixed statistics. Batch normalization in training needs statistics of
the whole image and is refused, as is dropout, whose mask would depend on the tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outcore.errors import ModelError, OutcoreError
from outcore.keras.installed import require_keras
from outcore.keras.tensorflow.calls import Call, Calls, list_calls, run_call, traced_functional
from outcore.keras.tensorflow.segments import SegmentedCall
from outcore.keras.tensorflow.tile_rules import Rule, Step, rule_of
from outcore.keras.twin import Slot, substitute
from outcore.ops.region import Interval, Region, cover, whole

__all__ = ["StreamedCall", "stream"]

Shape = tuple[int, ...]


def stream(model: Any, *, tile: int | Sequence[int]) -> Any:
    """Run a Keras model on TensorFlow in tiles; returns the same model, whose ``call`` streams from now on.

    Args:
        model: functional or sequential, with its batch normalization frozen (``layer.trainable = False``) if it is to
            be trained.
        tile: pixels of the boundary map along each side of a tile.

    Raises:
        ModelError: the first layer cannot be run in tiles.
    """
    keras = require_keras()
    functional = traced_functional(keras, model)
    calls = list_calls(keras, model, functional)
    sides = (tile,) if isinstance(tile, int) else tuple(tile)
    if any(not isinstance(n, int) or n < 1 for n in sides):
        raise OutcoreError(f"tile={tile!r} is no number of pixels")
    model.__dict__["call"] = StreamedCall(keras, functional, calls, sides, model)
    for name in ("train_function", "test_function", "predict_function"):
        setattr(model, name, None)
    make = type(model).make_train_function

    def make_train_function(force: bool = False) -> Any:
        model.jit_compile, model.run_eagerly = False, True  # tiles are traced one by one, not the loop over them
        return make(model, force)

    model.__dict__["make_train_function"] = make_train_function
    return model


@dataclass(frozen=True)
class _Part:
    """The streamed part for inputs of one shape."""

    places: tuple[int, ...]
    """Numbers of its calls."""
    rules: dict[int, Rule]
    shapes: dict[int, Shape]
    """Between batch and channels, of every value in it."""
    boundary: tuple[int, ...]


@dataclass(frozen=True)
class _Tile:
    """One tile: the crops of the inputs and the steps that make it."""

    crops: tuple[tuple[int, Region], ...]
    steps: tuple[tuple[int, Step], ...]


class StreamedCall(SegmentedCall):
    """The ``call`` of a Keras model that runs in tiles."""

    def __init__(self, keras: Any, functional: Any, calls: Calls, tile: tuple[int, ...], model: Any = None) -> None:
        super().__init__(keras, functional, calls, (), model)
        self.tile = tile
        self.tiles_run = 0
        """Tiles that forward has run, over all calls."""
        self._parts: dict[Any, _Part] = {}
        self._functions: dict[Any, Any] = {}

    def __call__(self, inputs: Any, training: Any = None, mask: Any = None, **kwargs: Any) -> Any:
        """Keras' own, in tiles."""
        self.check_layers()
        if self.traced:
            training = training if training is not None else self.context_training()
            self.check_class()
        if mask is not None or kwargs:
            return type(self.functional).call(self.functional, inputs, training=training, mask=mask, **kwargs)
        given = self.functional._standardize_inputs(inputs)
        values = dict(zip(self.calls.inputs, given, strict=True))
        part = self._part([tuple(x.shape) for x in given], bool(training))
        sources = [n for n in self.calls.inputs if any(n in self.calls.calls[p].inputs for p in part.places)]
        for number in part.boundary:
            values[number] = self._streamed(part, number, sources, values, bool(training))
        inside = set(part.places)
        for place, call in enumerate(self.calls.calls):
            if place not in inside:
                run_call(call, values, training)
        made = substitute(self.calls.result, lambda x: values[x.number] if isinstance(x, Slot) else x)
        return made[0] if isinstance(made, (list, tuple)) and len(made) == 1 else made

    def _part(self, shapes: list[tuple[Any, ...]], training: bool) -> _Part:
        flags = tuple(getattr(call.operation, "trainable", True) for call in self.calls.calls)
        key = tuple(shapes), training, flags
        if key not in self._parts:
            self._parts[key] = _streamed_part(self.keras, self.calls, shapes, training)
        return self._parts[key]

    def _streamed(self, part: _Part, number: int, sources: list[int], values: dict[int, Any], training: bool) -> Any:
        """One boundary map, with its gradient."""
        tf, record = self.tf, self._record
        variables = list({id(v): v for p in part.places for v in self.calls.calls[p].variables}.values())
        weights = [tf.convert_to_tensor(v.value) for v in variables]
        images = [values[n] for n in sources]
        watched = [bool(record.should_record_backprop([x])) and x.dtype.is_floating for x in images]
        trained = [v.trainable for v in variables]
        rows = _grid(part.shapes[number], self.tile)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def run(*arguments: Any) -> Any:
            pixels, numbers = list(arguments[: len(images)]), list(arguments[len(images) :])

            def make(region: Region) -> Any:
                self.tiles_run += 1
                tile = _tile(part, self.calls, number, sources, region)
                crops = [_cut(x, r) for x, (_, r) in zip(pixels, tile.crops, strict=True)]
                return self._function(part, tile, number, variables, training, None)(crops, numbers)

            def backward(gradient: Any) -> list[Any]:
                sums: list[Any] = [None] * len(arguments)
                whole_images = [tf.zeros_like(x) if want else None for x, want in zip(pixels, watched, strict=True)]
                for region in itertools.product(*rows):
                    tile = _tile(part, self.calls, number, sources, region)
                    crops = [_cut(x, r) for x, (_, r) in zip(pixels, tile.crops, strict=True)]
                    flags = tuple(watched), tuple(trained)
                    function = self._function(part, tile, number, variables, training, flags)
                    for place, found in enumerate(function(crops, numbers, _cut(gradient, region))):
                        if found is None or found.shape.rank is None:
                            continue
                        if place < len(images):
                            at = tile.crops[place][1]
                            whole_images[place] = _added(tf, whole_images[place], found, at)
                        else:
                            sums[place] = found if sums[place] is None else sums[place] + found
                return [*whole_images, *sums[len(images) :]]

            with record.stop_recording():  # an eager tape would keep what every tile has made, until backward
                return _joined(tf, rows, make), backward

        return run(*images, *weights)

    def _function(self, part: _Part, tile: _Tile, number: int, variables: list[Any], training: bool, flags: Any) -> Any:
        """The function of tiles like this one, traced when it is first called."""
        key = tile.steps, tuple(tuple(b - a for a, b in r) for _, r in tile.crops), number, training, flags
        if key in self._functions:
            return self._functions[key]
        tf, keras = self.tf, self.keras
        names, steps, rules = [n for n, _ in tile.crops], tile.steps, part.rules

        def forward(crops: list[Any], numbers: list[Any]) -> Any:
            values = dict(zip(names, crops, strict=True))
            mapping = list(zip(variables, numbers, strict=True))
            with keras.StatelessScope(state_mapping=mapping, initialize_variables=False):
                for place, step in steps:
                    call = self.calls.calls[place]
                    cut = [_cut(values[n], r) for n, r in zip(call.inputs, step.cuts, strict=True)]
                    made = rules[place].run(cut, step)
                    values[call.outputs[0]] = made if step.keep is None else _cut(made, step.keep)
            return values[number]

        def backward(crops: list[Any], numbers: list[Any], gradient: Any) -> Any:
            images, trained = flags
            wanted = [t for t, want in zip([*crops, *numbers], [*images, *trained], strict=True) if want]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(wanted)
                made = forward(crops, numbers)
            found = iter(tape.gradient(made, wanted, gradient))
            return [next(found) if want else None for want in [*images, *trained]]

        function = tf.function(forward if flags is None else backward, autograph=False, reduce_retracing=False)
        function._omit_frequent_tracing_warning = True  # each is traced once
        self._functions[key] = function
        return function


def _streamed_part(keras: Any, calls: Calls, shapes: list[tuple[Any, ...]], training: bool) -> _Part:
    """The calls that can be run in tiles, from the inputs on."""
    known: dict[int, Shape] = {n: tuple(s[1:-1]) for n, s in zip(calls.inputs, shapes, strict=True) if len(s) > 2}
    rules: dict[int, Rule] = {}
    first: Call | None = None
    for place, call in enumerate(calls.calls):
        given = [known.get(n) for n in call.inputs]
        rule = rule_of(keras, call, given, training) if len(call.outputs) == 1 else None
        if rule is None:
            first = first or call
            continue
        rules[place] = rule
        known[call.outputs[0]] = _output_shape(call, [s for s in given if s is not None])
    if not rules:
        assert first is not None
        raise ModelError(f"{first.path} ({type(first.operation).__name__}) cannot be run in tiles, and it is the first")
    inside = {calls.calls[p].outputs[0] for p in rules}
    used = {n for place, call in enumerate(calls.calls) if place not in rules for n in call.inputs} | calls.outputs
    return _Part(tuple(rules), rules, known, tuple(sorted(inside & used)))


def _output_shape(call: Call, shapes: list[Shape]) -> Shape:
    """The pixels of a layer's output, for the pixels of its inputs."""
    layer = call.operation
    if not hasattr(layer, "compute_output_shape") or len(call.inputs) != 1:
        return shapes[0]
    kind = type(layer).__name__
    if not kind.startswith(
        ("Conv", "Depthwise", "Separable", "MaxPool", "AveragePool", "UpSamp", "ZeroPad", "Cropping")
    ):
        return shapes[0]
    channels = getattr(layer, "input_spec", None)
    axes = getattr(channels, "axes", None) or {}
    return tuple(layer.compute_output_shape((1, *shapes[0], axes.get(-1, 1)))[1:-1])


def _grid(shape: Shape, tile: tuple[int, ...]) -> list[list[Interval]]:
    sides = tile * len(shape) if len(tile) == 1 else tile
    if len(sides) != len(shape):
        raise OutcoreError(f"tile has {len(sides)} sides; the map has {len(shape)}")
    return [[(a, min(a + side, n)) for a in range(0, n, side)] for n, side in zip(shape, sides, strict=True)]


def _tile(part: _Part, calls: Calls, number: int, sources: list[int], region: Region) -> _Tile:
    """The regions of all values that one region of the boundary depends on."""
    wanted: dict[int, Region] = {number: region}
    order = []
    for place in reversed(part.places):
        call = calls.calls[place]
        out = wanted.get(call.outputs[0])
        if out is not None:
            order.append(place)
            for n, need in zip(call.inputs, part.rules[place].needs(out), strict=True):
                wanted[n] = cover(wanted.get(n), need)
    steps = []
    for place in reversed(order):
        call, rule = calls.calls[place], part.rules[place]
        out = wanted[call.outputs[0]]
        cuts = tuple(_within(need, wanted[n]) for n, need in zip(call.inputs, rule.needs(out), strict=True))
        pads, keep = rule.around(out)
        steps.append((place, Step(cuts, pads, keep)))
    crops = tuple((n, wanted.get(n, whole((1,) * len(part.shapes[n])))) for n in sources)
    return _Tile(crops, tuple(steps))


def _within(region: Region, held: Region) -> Region:
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(region, held, strict=True))


def _cut(x: Any, region: Region) -> Any:
    if all(a == 0 and b == n for (a, b), n in zip(region, x.shape[1:-1], strict=True)):
        return x
    return x[(slice(None), *(slice(a, b) for a, b in region), slice(None))]


def _added(tf: Any, image: Any, crop: Any, region: Region) -> Any:
    """An image with a crop added at its place."""
    pads = [(a, n - b) for (a, b), n in zip(region, image.shape[1:-1], strict=True)]
    return image + tf.pad(crop, [(0, 0), *pads, (0, 0)])


def _joined(tf: Any, rows: list[list[Interval]], make: Any) -> Any:
    """The map, from its tiles."""

    def along(dim: int, region: tuple[Interval, ...]) -> Any:
        if dim == len(rows):
            return make(region)
        return tf.concat([along(dim + 1, (*region, one)) for one in rows[dim]], dim + 1)

    return along(0, ())
