"""The graph of a model or layer that is written as a class.

A class with a ``call`` of its own keeps no graph. But its ``call`` can be run on Keras' symbolic tensors: every layer
and every operation of `keras.ops` in it then notes a node, and the nodes are the graph of a functional model over the
same layers and weights. What ``call`` does beside that is not in the graph, so it is run twice, in training and not,
and both graphs have to be alike, constants included: a branch on ``training``, and a number that is drawn in between,
show up as a difference. What cannot be run on symbolic tensors (functions of TensorFlow or torch, a branch on a value)
raises, and is refused with the class's path.

Keras notes ``training=`` at every node, the default of a layer too. In a functional model what is noted says nothing: a
call of the model in training is one of all its layers in training. In a class, a layer that is given ``training=False``
keeps it. Here the node says so in both runs; where they differ it follows the model, and nothing is left at the node.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from outcore.errors import ModelError
from outcore.keras.installed import numbered_anew
from outcore.keras.twin import leaves, substitute

__all__ = ["fixed_mode", "functional_of", "graph_of_call", "graph_of_class", "inputs_of", "still_does"]

_TRACED, _CONTEXT = "_traced_from_a_class", "current_call_ctx"
_ADVICE = (
    "write it with layers and keras.ops alone, build it as a functional model, keras.Model(inputs, outputs), or set "
    "KERAS_BACKEND=torch and give the model itself to outcore, which records any torch module"
)


def inputs_of(keras: Any, model: Any) -> Any:
    """The symbolic inputs of a model, in their structure; of a class, as it was built."""
    kept = functional_inputs(model)
    if kept is not None:
        return kept
    words = any(isinstance(layer, keras.layers.Embedding) for layer in model._flatten_layers())
    dtype = "int32" if words else model.input_dtype
    return _inputs(keras, next(iter(model._build_shapes_dict.values())), dtype)


def functional_of(keras: Any, model: Any) -> Any:
    """The functional model inside a model, or none if it has a ``call`` of its own.

    What `graph_of_class` makes of the latter has the same form.
    """
    functional = keras.src.models.functional.Functional
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call:
        return model._functional
    return model if isinstance(model, functional) and type(model).call is functional.call else None


def functional_inputs(model: Any) -> Any:
    """The symbolic inputs of a functional or sequential model; none of a class."""
    return getattr(getattr(model, "_functional", None) or model, "_inputs_struct", None)


def fixed_mode(graph: Any, node: Any) -> bool | None:
    """The mode that the ``call`` of a class gives to a layer, whatever its own is; none if there is no such."""
    return node.arguments.kwargs.get("training") if graph.__dict__.get(_TRACED) else None


def graph_of_class(keras: Any, model: Any, path: str) -> Any:
    """A functional model over the layers of a built model that is a class of its own."""
    if functional_inputs(model) is not None:  # a subclass of one that keeps its graph, with a call of its own
        return graph_of_call(keras, model, (inputs_of(keras, model),), path)
    shapes = getattr(model, "_build_shapes_dict", None)
    if model.built and not shapes:  # built by a call, as Keras does where it cannot trace one
        _refuse(model, path, "its call does not run on symbolic tensors")
    if not shapes:
        raise ModelError(f"{path} ({type(model).__name__}) is not built; call it once on a batch")
    if len(shapes) != 1:
        _refuse(model, path, f"its call takes {len(shapes)} inputs one by one", "take one list of inputs")
    return graph_of_call(keras, model, (inputs_of(keras, model),), path)


def graph_of_call(keras: Any, layer: Any, args: tuple[Any, ...], path: str) -> Any:
    """A functional model of what a layer's ``call`` does with inputs like the given symbolic ones."""

    if any(not isinstance(x, keras.KerasTensor) for x in leaves(args)):
        _refuse(layer, path, "it is called with something that is no tensor")
    made = []
    for mode in (True, False):
        try:
            made.append(_run(keras, layer, args, mode))
        except Exception as error:  # whatever the user's code does with a symbolic tensor
            _refuse(layer, path, f"its call does not run on symbolic tensors ({str(error).strip().splitlines()[0]})")
    if list(_facts(keras, made[0])) != list(_facts(keras, made[1])):
        _refuse(
            layer, path, "its call does something else from call to call: it branches on training, or draws numbers"
        )
    for one, other in zip(_nodes(made[0]), _nodes(made[1]), strict=True):
        if one.arguments.kwargs.get("training") != other.arguments.kwargs.get("training"):
            del one.arguments.kwargs["training"]
    made[0].__dict__[_TRACED] = True
    return made[0]


def still_does(keras: Any, model: Any, graph: Any) -> bool:
    """Whether the ``call`` of a class, run once more in training, is what its graph says."""
    try:
        now = _run(keras, model, (graph._inputs_struct,), True)
    except Exception:  # whatever the user's code does by now
        return False
    if list(_facts(keras, now)) != list(_facts(keras, graph)):
        return False
    modes = ((a.arguments.kwargs, b.arguments.kwargs) for a, b in zip(_nodes(graph), _nodes(now), strict=True))
    return all(
        new.get("training") is old["training"] if "training" in old else new.get("training") in (True, None)
        for old, new in modes
    )


def _run(keras: Any, layer: Any, args: tuple[Any, ...], mode: bool) -> Any:
    """A functional model of what a ``call`` does in training or not, with inputs like the given symbolic ones.

    Its operations are numbered anew: they give their names to a twin, which has to have the same ones every time.
    """

    def fresh(tensor: Any) -> Any:
        return keras.Input(batch_shape=(None, *tensor.shape[1:]), dtype=tensor.dtype)

    symbolic = substitute(args, fresh)
    how = {"training": mode} if getattr(layer, "_call_has_training_arg", False) else {}
    read: list[Any] = []
    with keras.StatelessScope(collect_losses=True) as scope, _calling(layer, mode), numbered_anew():
        value_of = scope.get_current_value

        def noted(variable: Any) -> Any:
            read.append(variable)
            return value_of(variable)

        scope.get_current_value = noted
        outputs = type(layer).call(layer, *symbolic, **how)
    if scope.losses:
        raise ValueError("it adds a loss of its own; let a layer add it")
    if scope.state_mapping:
        raise ValueError("it changes variables or draws numbers; let a layer do it")
    if read:  # what comes of it would be a constant, and the weight would not be trained
        raise ValueError(
            f"it computes with {read[0].path} alone; let a layer do it, or give the weight to an operation together "
            "with what depends on the input"
        )
    inputs = symbolic[0] if len(symbolic) == 1 else list(leaves(symbolic))
    return keras.src.models.functional.Functional(inputs, outputs, name=layer.name)


@contextmanager
def _calling(layer: Any, training: bool) -> Iterator[None]:
    """As in a call of a layer in some mode, which the layers inside of it take where they are not told."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    context = importlib.import_module("keras.src.layers.layer").CallContext(entry_layer=layer)
    context.training = training
    before = state.get_global_attribute(_CONTEXT)
    state.set_global_attribute(_CONTEXT, context)
    try:
        yield
    finally:
        state.set_global_attribute(_CONTEXT, before)


def _nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a graph but its inputs, in the order of execution."""
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        yield from (node for node in graph._nodes_by_depth[depth] if not node.is_input)


def _inputs(keras: Any, shape: Any, dtype: str) -> Any:
    """Symbolic inputs for a structure of shapes."""
    if isinstance(shape, dict):
        return {name: _inputs(keras, one, dtype) for name, one in shape.items()}
    if shape and isinstance(shape[0], (list, tuple)):
        return [_inputs(keras, one, dtype) for one in shape]
    return keras.Input(batch_shape=(None, *shape[1:]), dtype=dtype)


def _facts(keras: Any, graph: Any) -> Iterator[Any]:
    """What two graphs of one call have to have in common."""
    number: dict[int, int] = {}
    for tensor in graph.inputs:
        number[id(tensor)] = len(number)
    for node in _nodes(graph):
        own = isinstance(node.operation, keras.layers.Layer)
        yield id(node.operation) if own else (type(node.operation).__name__, *_settings(keras, node.operation))
        for item in leaves((node.arguments.args, {k: v for k, v in node.arguments.kwargs.items() if k != "training"})):
            if isinstance(item, keras.KerasTensor):
                yield number.setdefault(id(item), len(number))
            elif hasattr(item, "shape") and not isinstance(item, keras.Variable):
                yield np.asarray(keras.ops.convert_to_numpy(item)).tobytes()
            else:
                yield id(item) if isinstance(item, keras.Variable) else repr(item)
        for tensor in node.outputs:
            number[id(tensor)] = number.get(id(tensor), len(number))
    yield repr(substitute(graph._outputs_struct, lambda tensor: number.get(id(tensor))))


def _settings(keras: Any, operation: Any) -> Iterator[Any]:
    """What an operation was made with, as a slope or an axis: it is no argument of its call."""
    for name, value in sorted(vars(operation).items()):
        if name.startswith("_") or name == "name":
            continue
        if hasattr(value, "shape") and not isinstance(value, keras.Variable):
            yield name, np.asarray(keras.ops.convert_to_numpy(value)).tobytes()
        elif callable(value):  # a function that is made anew in every call
            yield name, getattr(value, "__code__", type(value).__name__)
        else:
            yield name, id(value) if isinstance(value, keras.Variable) else repr(value)


def _refuse(layer: Any, path: str, why: str, do: str = _ADVICE) -> Any:
    raise ModelError(f"{path} ({type(layer).__name__}) is a class of its own, and {why}; {do}")
