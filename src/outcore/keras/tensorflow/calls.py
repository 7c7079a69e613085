"""The calls of a Keras model, one after the other.

A functional model keeps its graph as nodes, and runs them by depth. Here the same nodes, in the same order, are a list
of calls over numbered values, with the calls of nested models in their place: a plan can then cut anywhere in the list,
also inside a backbone that the model wraps. Running the list calls the model's own layers, as Keras
does, but drops each value after its last use; Keras holds all of them until the last layer has run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from outcore.errors import ModelError
from outcore.keras.symbolic import fixed_mode, functional_of, graph_of_class, still_does
from outcore.keras.twin import Slot, leaves, substitute

__all__ = ["Call", "Calls", "OrderedCall", "list_calls", "run_call", "traced_functional"]


@dataclass(frozen=True)
class Call:
    """One layer or operation, called with numbered values."""

    path: str
    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    training: Any = None
    """How the nested model around it is called, for where the outer model is not told."""
    fixed: bool = False
    """Whether it is called so in any case: the ``call`` of a class says it. A functional model overrides it."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values it takes, each once."""
        return tuple(dict.fromkeys(x.number for x in leaves((self.args, self.kwargs)) if isinstance(x, Slot)))

    @property
    def variables(self) -> list[Any]:
        """Keras' variables of the layer: weights, statistics, seeds."""
        given = [x for x in leaves((self.args, self.kwargs)) if hasattr(x, "regularizer")]
        return [*getattr(self.operation, "variables", ()), *given]


@dataclass(frozen=True)
class Calls:
    """A model as a list of calls."""

    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    result: Any
    """The structure of the outputs, with numbered values in it."""
    graphs: tuple[tuple[Any, Any], ...] = ()
    """Models whose calls these are, each with its graph; a sequential one has another after its layers are changed."""

    @property
    def outputs(self) -> set[int]:
        """The values that the model returns."""
        return {slot.number for slot in leaves(self.result)}

    def last_uses(self) -> dict[int, int]:
        """The number of the last call that takes a value; returned values are taken after the last."""
        last = {number: place for place, call in enumerate(self.calls) for number in (*call.outputs, *call.inputs)}
        return last | dict.fromkeys(self.outputs, len(self.calls))


def traced_functional(keras: Any, model: Any) -> Any:
    """The functional model inside a model, or one that is made by calling its class on symbolic tensors."""
    found = functional_of(keras, model)
    if found is None and (not isinstance(model, keras.Sequential) or model._functional is not None):
        found = graph_of_class(keras, model, model.name)
    return found


def list_calls(keras: Any, model: Any, functional: Any = None) -> Calls:
    """The calls of a model.

    Raises:
        ModelError: the model keeps no graph, and none can be traced.
    """
    functional = functional if functional is not None else traced_functional(keras, model)
    if functional is None:
        raise ModelError(f"{model.name} is not built; call it once on a batch")
    listing = _Listing(keras)
    slots = [listing.new() for _ in functional.inputs]
    result = listing.walk(functional, slots, model.name, None, False)
    graphs = ((model, functional), *listing.nested)
    return Calls(tuple(listing.calls), tuple(slots), substitute(result, Slot), graphs)


class _Listing:
    def __init__(self, keras: Any) -> None:
        self.keras, self.calls, self.count = keras, list[Call](), 0
        self.nested: list[tuple[Any, Any]] = []

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def walk(self, graph: Any, inputs: Iterable[int], path: str, training: Any, fixed: bool) -> Any:
        """Append the calls of a graph, which is called so; the numbers of its outputs, in their structure."""
        numbers = {id(tensor): number for tensor, number in zip(graph.inputs, inputs, strict=True)}
        for depth in sorted(graph._nodes_by_depth, reverse=True):
            for node in graph._nodes_by_depth[depth]:
                if node.is_input or any(id(tensor) not in numbers for tensor in node.arguments.keras_tensors):
                    continue
                known = training if training is not None else node.arguments.kwargs.get("training")
                self._node(node, numbers, path, known, fixed or fixed_mode(graph, node) is not None)
        return substitute(graph._outputs_struct, lambda tensor: numbers[id(tensor)])

    def _node(self, node: Any, numbers: dict[int, int], path: str, training: Any, fixed: bool) -> None:
        operation, path = node.operation, f"{path}/{node.operation.name}"
        inner = self._inlined(node)
        if inner is not None:
            self.nested.append((operation, inner))
            given = [numbers[id(tensor)] for tensor in leaves(node.arguments.args[0])]
            made = self.walk(inner, given, path, training, fixed)
            for tensor, number in zip(node.outputs, leaves(made), strict=True):
                numbers[id(tensor)] = number
            return

        def value(item: Any) -> Any:
            return Slot(numbers[id(item)]) if isinstance(item, self.keras.KerasTensor) else item

        args, kwargs = substitute(node.arguments.args, value), substitute(node.arguments.kwargs, value)
        for tensor in node.outputs:
            numbers[id(tensor)] = self.new()
        outputs = tuple(numbers[id(tensor)] for tensor in node.outputs)
        self.calls.append(Call(path, operation, args, kwargs, outputs, training, fixed))

    def _inlined(self, node: Any) -> Any:
        """The graph of a nested model whose inputs arrive as it declares them; of anything else none."""
        inner = functional_of(self.keras, node.operation)
        arguments = node.arguments
        if inner is None or len(arguments.args) != 1 or set(arguments.kwargs) - {"training"}:
            return None
        given = list(leaves(arguments.args[0]))
        if any(not isinstance(tensor, self.keras.KerasTensor) for tensor in given) or len(given) != len(inner.inputs):
            return None
        alike = all(
            len(a.shape) == len(b.shape) and a.dtype == b.dtype and not a.sparse
            for a, b in zip(given, inner.inputs, strict=True)
        )
        ordered = not isinstance(arguments.args[0], dict) and not isinstance(inner._inputs_struct, dict)
        return inner if alike and ordered else None


def run_call(call: Call, values: dict[int, Any], training: Any) -> None:
    """Call a layer as Keras' functional model does, and note its outputs."""
    kwargs = substitute(call.kwargs, lambda x: values[x.number] if isinstance(x, Slot) else x)
    mode = training if training is not None and not call.fixed else call.training
    if mode is not None and "training" in getattr(call.operation, "_call_context_args", ()):
        kwargs["training"] = mode
    made = call.operation(*substitute(call.args, lambda x: values[x.number] if isinstance(x, Slot) else x), **kwargs)
    for number, tensor in zip(call.outputs, leaves(made), strict=True):
        values[number] = tensor


class OrderedCall:
    """A ``call`` that takes the place of a Keras model's own on the instance, and keeps no value longer than needed."""

    def __init__(self, keras: Any, functional: Any, calls: Calls, model: Any = None) -> None:
        self.model = functional if model is None else model
        self.keras, self.functional, self.calls = keras, functional, calls
        self.last = calls.last_uses()
        self.traced = functional_of(keras, self.model) is None
        """Whether the model is a class, whose calls were found by running it on symbolic tensors."""

    def __call__(self, inputs: Any, training: Any = None, mask: Any = None, **kwargs: Any) -> Any:
        """Keras' own, call by call; what it is told beside that goes to Keras."""
        self.check_layers()
        if self.traced:
            training = training if training is not None else self.context_training()
            trains = self.recorded() if training is None else training
            if not trains or mask is not None or kwargs:  # a class, which was traced in training
                told = kwargs | {k: v for k, v in (("training", training), ("mask", mask)) if v is not None}
                own = {k: v for k, v in told.items() if k in self.model._call_signature.parameters}
                return type(self.model).call(self.model, inputs, **own)
            self.check_class()
        if kwargs:
            return type(self.functional).call(self.functional, inputs, training=training, mask=mask, **kwargs)
        given = self.functional._standardize_inputs(inputs)
        if mask is not None:
            for x, m in zip(given, self.keras.tree.flatten(mask), strict=True):
                if m is not None:
                    self.keras.src.backend.set_keras_mask(x, m)
        values = dict(zip(self.calls.inputs, given, strict=True))
        del given, inputs
        self.run(values, training)
        made = substitute(self.calls.result, lambda x: values[x.number] if isinstance(x, Slot) else x)
        return made[0] if isinstance(made, (list, tuple)) and len(made) == 1 else made

    def recorded(self) -> bool:
        """Whether gradients may be asked for of a call that is told no mode: a class may take none."""
        return False

    def check_layers(self) -> None:
        """Refuse to go on where a sequential model, or one inside, has been given other layers."""
        for model, graph in self.calls.graphs:
            now = functional_of(self.keras, model)
            if now is not None and now is not graph:
                self.refuse("has other layers", model)

    def check_class(self) -> None:
        """Refuse to go on where the ``call`` of a class has come to do something else."""
        if not still_does(self.keras, self.model, self.functional):
            self.refuse("does something else")

    def refuse(self, what: str, model: Any = None) -> NoReturn:
        """Say that the model is no longer the one that was planned."""
        name = (model if model is not None else self.model).name
        raise ModelError(f"{name} {what} than when it was given to outcore; give it to outcore again, or release it")

    def context_training(self) -> Any:
        """Whether the call that this one is part of trains."""
        context = self.model._get_call_context()
        return context.get_value("training") if hasattr(context, "get_value") else getattr(context, "training", None)

    def run(self, values: dict[int, Any], training: Any) -> None:
        """All calls over numbered values."""
        self.run_range(0, len(self.calls.calls), values, training)

    def run_range(self, start: int, stop: int, values: dict[int, Any], training: Any) -> None:
        """Some calls, dropping each value after its last use."""
        for place in range(start, stop):
            call = self.calls.calls[place]
            run_call(call, values, training)
            for number in {*call.inputs, *call.outputs}:
                if self.last[number] <= place:
                    del values[number]
            self.done(call)

    def done(self, call: Call) -> None:
        """After a call has run, and what it was the last to use was dropped."""
