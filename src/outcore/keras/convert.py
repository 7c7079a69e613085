"""From a Keras model to its twin.

A functional or sequential Keras model carries its graph: nodes, each the call of one layer or operation on symbolic
tensors. They are visited in Keras' own order of execution; for each, the converter of its class makes a module, and the
step that calls it is noted together with the permutations its inputs need. A nested model becomes a nested twin; a
layer called twice is one module called twice. A model or layer written as a class of its own is called once on symbolic
tensors, which gives the graph of what it calls.

Everything is converted before anything is given back: the first layer that cannot be carried over is named with its
path, and so is every weight that would have been left behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from outcore.errors import ModelError
from outcore.keras import layers as _layers  # noqa: F401  (enters the converters)
from outcore.keras.carried import Weight
from outcore.keras.check import check_twin
from outcore.keras.installed import is_keras, refuse_keras_2, require_keras
from outcore.keras.part import CONVERTERS, Part, Site
from outcore.keras.refusals import (
    Precision,
    refuse_extras,
    refuse_masked_outputs,
    refuse_update,
    what_to_do,
    why_unknown,
)
from outcore.keras.symbolic import fixed_mode, functional_of, graph_of_call, graph_of_class
from outcore.keras.twin import Constant, Fixed, Slot, Step, Twin, leaves, substitute

__all__ = ["to_torch"]


def to_torch(
    model: Any,
    *,
    layers: Mapping[type[Any], Callable[[Any], nn.Module]] | None = None,
    check: bool = True,
) -> Twin:
    """A torch module that computes what a Keras model does, with its weights.

    It takes and returns values as the Keras model does (channels last), has one module per Keras layer under the
    layer's name, and trains as the Keras model would: dropout and batch normalization follow ``twin.train()``, and
    weights that are not trainable in Keras do not require a gradient. `write_back` carries its weights back.

    Args:
        model: a built Keras 3 model, on any backend.
        layers: for layer classes of your own, a function that makes a module from the layer. The module takes and
            returns values as Keras has them, and its weights are its own: they are not written back.
        check: compare the outputs of both on a random input before the twin is given back.

    Raises:
        ModelError: a layer cannot be carried over; it is named with its path and what to do.
    """
    keras = require_keras()
    refuse_keras_2(model)
    if not is_keras(model):
        raise ModelError(f"to_torch takes a Keras 3 model; {type(model).__module__}.{type(model).__name__} is none")
    if not isinstance(model, keras.Model):
        raise ModelError(f"{model.name} is a {type(model).__name__}; wrap it: keras.Sequential([keras.Input(...), it])")
    conversion = _Conversion(keras, layers or {})
    twin = conversion.model(model, model.name, outermost=True)
    conversion.finish(twin, model)
    if check and not any(p.is_meta for p in twin.parameters()):
        check_twin(model, twin)
    return twin


_MASKS = {"mask", "query_mask", "value_mask", "key_mask"}
"""Arguments that Keras fills from masks; ``attention_mask`` is an input like others."""


def module_name(name: str) -> str:
    """A Keras name as torch allows it."""
    return re.sub(r"\W", "_", name) or "layer"


class _Conversion:
    """The modules made so far, and the weights they carry."""

    def __init__(self, keras: Any, own: Mapping[type[Any], Callable[[Any], nn.Module]]) -> None:
        self.keras, self.own = keras, own
        self.parts: dict[Any, Part] = {}
        self.models: dict[int, Twin] = {}
        self.weights: list[tuple[nn.Module, Weight]] = []
        self.foreign: set[int] = set()
        """Weights that a function of the user's has taken over."""
        self.precision = Precision()

    def model(self, model: Any, path: str, *, outermost: bool = False) -> Twin:
        """The twin of a model that has a graph."""
        if id(model) not in self.models:
            self.precision.refuse_others(model, path)
            graph = graph_of(self.keras, model, path)
            if outermost:
                refuse_masked_outputs(self.keras, graph, path)
            self.models[id(model)] = _GraphWalk(self, graph, path).run()
        return self.models[id(model)]

    def part(self, layer: Any, site: Site) -> Part:
        """The module of one layer or operation."""
        key = (id(layer), site.ranks) if not getattr(layer, "weights", ()) else id(layer)
        if key not in self.parts:
            made = self._make(layer, site)
            refuse_update((weight.variable for weight in made.weights), site)
            self.parts[key] = made
            self.weights += [(made.module, weight) for weight in made.weights]
        return self.parts[key]

    def _make(self, layer: Any, site: Site) -> Part:
        self.precision.refuse_others(layer, site.path)
        for kind, function in self.own.items():
            if isinstance(layer, kind):
                self.foreign |= {id(weight) for weight in layer.weights}
                return Part(function(layer))
        if isinstance(layer, (self.keras.Sequential, self.keras.src.models.functional.Functional)):
            return Part(self.model(layer, site.path))
        family = re.match(r"keras\.src\.(layers|ops|applications)\.", type(layer).__module__)
        converter = CONVERTERS.get(f"{family[1]}.{type(layer).__name__}") if family else None
        if converter is None and isinstance(layer, self.keras.layers.Layer) and not family:
            refuse_extras(layer, site)
            if not site.kwargs:
                graph = graph_of_call(self.keras, layer, site.args, site.path)
                return Part(_GraphWalk(self, graph, site.path).run())
        if converter is None:
            site.refuse(why_unknown(layer), what_to_do(layer))
        refuse_extras(layer, site)
        return converter(layer, site)

    def finish(self, twin: Twin, model: Any) -> None:
        """Copy the weights, and see that none is left."""
        index = {id(variable): number for number, variable in enumerate(model.weights)}
        names = {id(module): name for name, module in reversed(list(twin.named_modules()))}
        carried = []
        for module, weight in self.weights:
            if id(weight.variable) not in index:
                raise ModelError(f"{weight.variable.path} is no weight of {model.name}; build the model anew")
            prefix = names[id(module)]
            carried.append(weight.carried(index[id(weight.variable)], f"{prefix}." if prefix else ""))
        taken = {id(weight.variable) for _, weight in self.weights} | self.foreign
        left = [variable.path for variable in model.weights if id(variable) not in taken]
        if left:
            raise ModelError(
                f"{len(left)} weights of {model.name} are in no layer that is called, {left[0]} first; "
                "remove the layers that nothing uses"
            )
        twin.carried = tuple(carried)
        twin.config = _config(model)
        trained = {id(variable) for variable in model.trainable_variables}
        for (_, weight), entry in zip(self.weights, carried, strict=True):
            tensor = entry.to_torch(self.keras.ops.convert_to_numpy(weight.variable))
            _set(twin, entry.name, weight, tensor, trained=id(weight.variable) in trained)


class _GraphWalk:
    """The steps of one model."""

    def __init__(self, conversion: _Conversion, graph: Any, path: str) -> None:
        self.conversion, self.graph, self.path = conversion, graph, path
        self.count = 0
        self.slots: dict[tuple[int, bool], int] = {}
        """Number of a value, by the symbolic tensor and whether channels come first."""
        self.own: dict[str, Any] = {}
        """Weights that operations take themselves, by their names in the twin."""
        inputs = {}
        for tensor in leaves(graph._inputs_struct):
            self.slots[id(tensor), False] = self._number()
            inputs[str(tensor.name)] = (self.slots[id(tensor), False], str(tensor.dtype))
        self.twin = Twin(inputs, not isinstance(graph._inputs_struct, (list, tuple, dict)))

    def _number(self) -> int:
        self.count += 1
        return self.count - 1

    def run(self) -> Twin:
        """Every node in the order of execution, then the outputs as Keras has them."""
        for depth in sorted(self.graph._nodes_by_depth, reverse=True):
            for node in self.graph._nodes_by_depth[depth]:
                if not node.is_input and all(self._known(tensor) for tensor in node.arguments.keras_tensors):
                    self._node(node)
        self.twin.result = substitute(self.graph._outputs_struct, lambda t: Slot(self._slot(t, False)))
        kept = {slot.number for slot in leaves(self.twin.result)}
        last: set[int] = set()
        for number in range(len(self.twin.steps) - 1, -1, -1):
            step = self.twin.steps[number]
            used = {s.number for s in leaves((step.args, step.kwargs)) if isinstance(s, Slot)} | set(step.outputs)
            drop = tuple(sorted(used - kept - last))
            last |= used
            self.twin.steps[number] = Step(step.module, step.args, step.kwargs, step.outputs, drop, step.to_first)
        return self.twin

    def _known(self, tensor: Any) -> bool:
        return (id(tensor), False) in self.slots or (id(tensor), True) in self.slots

    def _slot(self, tensor: Any, first: bool) -> int:
        """The number of a value in a layout, permuted if it is not there yet."""
        first = first and len(tensor.shape) > 2
        if (id(tensor), first) not in self.slots:
            given = Slot(self.slots[id(tensor), not first])
            number = self._number()
            self.twin.steps.append(Step(None, (given,), {}, (number,), (), first))
            self.slots[id(tensor), first] = number
        return self.slots[id(tensor), first]

    def _node(self, node: Any) -> None:
        layer, tensors = node.operation, node.arguments.keras_tensors
        path = f"{self.path}/{layer.name}"
        kwargs = {k: v for k, v in node.arguments.kwargs.items() if v is not None}
        kwargs.pop("training", None)
        training = fixed_mode(self.graph, node)
        arrays = [x for x in leaves((node.arguments.args, kwargs)) if _is_array(x)]
        images = [t for t in tensors if len(t.shape) > 2]
        first = any((id(t), True) in self.slots for t in images) and not arrays
        site = Site(
            path,
            type(layer).__name__,
            tuple(len(t.shape) for t in tensors),
            first,
            tuple(node.arguments.args),
            kwargs,
            self.conversion.part,
        )
        if _MASKS & set(kwargs):
            site.refuse("it is called with a mask", "masks are not carried over")
        part = self.conversion.part(layer, site)
        name = self._register(layer, part.module, training, site)

        def value(item: Any) -> Any:
            if isinstance(item, self.conversion.keras.KerasTensor):
                return Slot(self._slot(item, part.first))
            if isinstance(item, self.conversion.keras.Variable):
                refuse_update([item], site)
                return self._weight(item)
            return self._constant(item) if _is_array(item) else item

        args = substitute(node.arguments.args, value)
        kwargs = substitute(kwargs, value)
        numbers = []
        for tensor in node.outputs:
            number = self._number()
            self.slots[id(tensor), part.first and len(tensor.shape) > 2] = number
            numbers.append(number)
        self.twin.steps.append(Step(name, args, kwargs, tuple(numbers)))

    def _register(self, layer: Any, module: nn.Module, training: Any, site: Site) -> str:
        """The name under which a module is a child; the same for every call of a layer."""
        if training is not None:
            modes = [m for m in module.modules() if isinstance(m, nn.Module)]
            if any(isinstance(m, Fixed) and m.mode != training for m in modes):
                site.refuse(f"it is called with training={training} and otherwise too", "give each call its own layer")
        for name, child in self.twin._modules.items():
            if child is module or (isinstance(child, Fixed) and child.inner is module):
                if isinstance(child, Fixed) != (training is not None) or (
                    isinstance(child, Fixed) and child.mode != training
                ):
                    site.refuse("it is called with training= given and without", "give each call its own layer")
                return name
        name = module_name(layer.name)
        while hasattr(self.twin, name):
            name += "_"
        self.twin.add_module(name, module if training is None else Fixed(module, bool(training)))
        return name

    def _weight(self, variable: Any) -> Constant:
        """A weight that an operation takes itself, in the ``call`` of a class."""
        for name, known in self.own.items():
            if known is variable:
                return Constant(name)
        name = module_name(variable.name)
        while hasattr(self.twin, name):
            name += "_"
        dtype = getattr(torch, str(variable.dtype))
        blank = torch.zeros(tuple(variable.shape), dtype=dtype, device="cpu")
        if variable.trainable and dtype.is_floating_point:
            self.twin.register_parameter(name, nn.Parameter(blank))
        else:
            self.twin.register_buffer(name, blank)
        self.own[name] = variable
        self.conversion.weights.append((self.twin, Weight(variable, name)))
        return Constant(name)

    def _constant(self, array: Any) -> Constant:
        name = f"constant_{sum(1 for n in self.twin._buffers if n.startswith('constant_'))}"
        tensor = torch.from_numpy(np.array(self.conversion.keras.ops.convert_to_numpy(array)))
        self.twin.register_buffer(name, tensor, persistent=False)
        return Constant(name)


def graph_of(keras: Any, model: Any, path: str) -> Any:
    """The graph of a model, as Keras keeps it."""
    if isinstance(model, keras.Sequential) and model._functional is None:
        raise ModelError(f"{path} is not built; call {path}.build(input_shape) first, or begin it with keras.Input")
    found = functional_of(keras, model)
    return graph_of_class(keras, model, path) if found is None else found


def _is_array(item: Any) -> bool:
    return hasattr(item, "shape") and hasattr(item, "dtype") and type(item).__name__ != "KerasTensor"


def _set(twin: Twin, name: str, weight: Weight, tensor: torch.Tensor, *, trained: bool) -> None:
    """Put a tensor where a weight belongs, in its own dtype."""
    owner_name, _, leaf = name.rpartition(".")
    owner = twin.get_submodule(owner_name)
    held = getattr(owner, leaf)
    if tuple(held.shape) != tuple(tensor.shape):
        raise ModelError(f"{weight.variable.path} is {tuple(tensor.shape)}; {name} takes {tuple(held.shape)}")
    if held.is_floating_point() and held.dtype != tensor.dtype:
        owner.to(tensor.dtype)
        held = getattr(owner, leaf)
    with torch.no_grad():
        held.copy_(tensor)
    if isinstance(held, nn.Parameter):
        held.requires_grad_(trained)


def _config(model: Any) -> str | None:
    try:
        return str(model.to_json())
    except Exception:  # a class of the user's without get_config
        return None
