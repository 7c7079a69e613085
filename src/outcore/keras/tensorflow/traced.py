"""A training step of a Keras model as TensorFlow traces it, without running it.

Forward, a loss and all gradients are traced as one graph for inputs of given shapes; nothing is computed, and no
variable changes. Which operations belong to which call is noted while tracing. From this graph come the facts that a
plan is made from: the buffers that each call makes and the gradients read, and an estimate of each call's work. What a
planned step takes is found with the step of ``fit`` itself (`trial`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outcore.keras.tensorflow.calls import Calls, run_call
from outcore.keras.tensorflow.effects import effects_of
from outcore.keras.tensorflow.executor import tensor_bytes, work_of
from outcore.keras.tensorflow.graph_memory import buffers_of
from outcore.keras.twin import leaves

__all__ = ["CallFacts", "StepFacts", "step_facts"]


@dataclass(frozen=True)
class CallFacts:
    """What one call makes."""

    saved: dict[Any, int]
    """Buffers that it makes and gradients read, with their sizes."""
    largest_bytes: int
    """The largest tensor that it makes."""
    work: float
    """Multiplications and bytes moved, as a number to compare calls by."""
    pure: bool
    """Whether it can be run again as a function: it adds no losses, its results are tensors, and it has no effects but
    on its own variables that are not trained. Not so are a stateful recurrent layer, whose state is none of its
    variables for Keras, a function that takes a weight from around it, spectral normalization, and `tf.nn.dropout`."""


@dataclass(frozen=True)
class StepFacts:
    """A plain step: its calls, and the buffer and size of every value."""

    calls: tuple[CallFacts, ...]
    buffer: dict[int, Any]
    """The buffer of a value, by its number."""
    bytes: dict[Any, int]
    outputs: dict[int, Any]
    """Shape and type of what the model returns, by its number."""
    changing: str
    """The first call that changes anything while it trains, other than its seeds; empty if there is none."""


def _trace(keras: Any, model: Any, specs: Sequence[Any], forward: Any) -> Any:
    """Forward, the mean square of the outputs and its gradients, as one traced function."""
    tf = importlib.import_module("tensorflow")
    variables = [v.value for v in model.trainable_variables]

    def step(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = [x for x in leaves(forward(list(given))) if isinstance(x, tf.Tensor)]
            loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(x, tf.float32))) for x in outputs if x.dtype.is_floating])
        return tape.gradient(loss, variables)

    try:
        return tf.function(step, autograph=False).get_concrete_function(*specs)
    finally:
        model._clear_losses()


def step_facts(keras: Any, model: Any, specs: Sequence[Any], calls: Calls) -> StepFacts:
    """Trace a plain step, call by call."""
    tf = importlib.import_module("tensorflow")
    values: dict[int, Any] = {}
    marks: list[tuple[int, int]] = []
    losses: list[int] = []

    def count() -> int:
        return len(tf.compat.v1.get_default_graph().get_operations())

    def forward(given: list[Any]) -> list[Any]:
        for kept in (values, marks, losses):  # traced twice where the first has made a variable
            kept.clear()
        values.update(zip(calls.inputs, given, strict=True))
        for call in calls.calls:
            before = count()
            run_call(call, values, True)
            marks.append((before, count()))
            losses.append(len(getattr(call.operation, "_losses", ())))
        return [values[n] for n in sorted(calls.outputs)]

    graph = _trace(keras, model, specs, forward).graph
    operations = graph.get_operations()
    owner = buffers_of(operations)
    end = marks[-1][1] if marks else 0
    read = {owner.get(t.ref(), t.ref()) for op in operations[end:] for t in op.inputs}
    outer = {inner.ref(): given for given, inner in graph.captures if inner.dtype == tf.resource}
    sizes: dict[Any, int] = {}
    facts, changing = [], ""
    for (before, after), added, call in zip(marks, losses, calls.calls, strict=True):
        made = [t for op in operations[before:after] for t in op.outputs if _own(op)]
        for tensor in made:
            sizes[owner[tensor.ref()]] = tensor_bytes(tensor) or 0
        saved = {owner[t.ref()]: sizes[owner[t.ref()]] for t in made if owner[t.ref()] in read}
        work = sum(work_of(op) for op in operations[before:after] if _own(op))
        pure = not added and all(isinstance(values[n], tf.Tensor) for n in call.outputs)
        effects = effects_of(call, operations[before:after], outer)
        pure = pure and effects.pure
        if not changing and effects.changes:
            changing = call.path
        facts.append(CallFacts(saved, max([tensor_bytes(t) or 0 for t in made], default=0), work, pure))
    buffer = {}
    for number, tensor in values.items():
        if isinstance(tensor, tf.Tensor):
            ref = owner.get(tensor.ref(), tensor.ref())
            buffer[number] = ref
            sizes.setdefault(ref, tensor_bytes(tensor) or 0)
    outputs = {n: tf.TensorSpec.from_tensor(values[n]) for n in calls.outputs if isinstance(values[n], tf.Tensor)}
    return StepFacts(tuple(facts), buffer, sizes, outputs, changing)


def _own(op: Any) -> bool:
    """Whether an operation makes memory of its own."""
    return op.type not in ("ReadVariableOp", "Const", "Placeholder", "VarHandleOp")
