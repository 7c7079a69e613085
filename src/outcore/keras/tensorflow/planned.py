"""A Keras model on TensorFlow within a memory budget.

`within` puts a planned ``call`` on the model, and where micro-batches are needed a ``train_step``; ``fit``,
``train_on_batch`` and a loop with `tf.GradientTape` go through them as they are. Weights, losses and metrics stay
Keras' own. XLA is switched off for the model's training step: it merges values across the step and keeps more of them
than TensorFlow's executor does.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outcore.errors import ModelError, OutcoreError, PlanError
from outcore.keras.installed import require_keras
from outcore.keras.tensorflow.calls import Calls, list_calls, traced_functional
from outcore.keras.tensorflow.micro_batches import accumulating_step, check_splittable, fixed_batch
from outcore.keras.tensorflow.plan import Choice, choose
from outcore.keras.tensorflow.segments import Segment, SegmentedCall
from outcore.keras.tensorflow.traced import step_facts
from outcore.keras.tensorflow.trial import FitTrial
from outcore.keras.twin import leaves
from outcore.machine.units import format_bytes, parse_bytes

__all__ = ["TensorFlowPlan", "memory_plan", "release", "within", "within_options"]

_SPLITS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class TensorFlowPlan:
    """What was decided for a Keras model on TensorFlow."""

    segments: tuple[tuple[str, str, bool], ...]
    """First and last call of every segment, and whether backward runs it again."""
    micro_batches: int
    work: float
    """The share of the forward's work that is done twice."""
    variable_bytes: int
    """Weights and the optimizer's state."""
    peak_bytes: int
    """Bytes in use of TensorFlow's allocator at the peak of a step, with weights, optimizer and targets in it: read off
    its graph, or under a budget what steps on zeros took, if that was more."""
    plain_bytes: int
    budget_bytes: int | None

    def __str__(self) -> str:
        again = sum(1 for *_, recompute in self.segments if recompute)
        parts = [f"{again} of {len(self.segments)} segments run again in backward" if again else "everything is kept"]
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        peak, plain = format_bytes(self.peak_bytes), format_bytes(self.plain_bytes)
        return f"{', '.join(parts)}: predicted peak {peak} (plain training {plain}), {self.work:.0%} of forward twice"


def within(
    model: Any,
    args: Any,
    *,
    memory: str | int | None,
    optimizer: float | None = None,
    micro_batches: int | None = None,
    quiet: bool = False,
) -> Any:
    """Make a Keras model on TensorFlow train within a memory budget; returns the same model.

    Under a budget a plan is tried before it is taken: a few steps of ``fit`` on zeros, by a copy of what the model was
    compiled with. Compile first: otherwise a squared error and Adam are assumed.

    Args:
        model: a functional or sequential Keras model, built.
        args: the inputs of a call, or their shapes, with the batch size it will be trained with.
        memory: the most a training step may hold ("8GiB", bytes, or "50%" of what plain training is predicted to
            take): bytes in use of TensorFlow's allocator, weights and optimizer state in it. None keeps everything.
        optimizer: the size of its state over that of the weights; without it, that of the compiled optimizer, or else
            Adam's.
        micro_batches: into how many parts ``fit`` splits a batch, adding up gradients. Without it one, and more only
            where recomputation is not enough and no layer changes a state of its own while it trains, as batch
            normalization does.
        quiet: do not say what was chosen.

    Raises:
        PlanError: the budget is too small; names the smallest that was found to work.
    """
    keras = require_keras()
    if keras.backend.backend() != "tensorflow":
        raise ModelError(
            f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow, or torch and call outcore.within, "
            "or carry the model over: outcore.keras.to_torch(model)"
        )
    if not isinstance(model, keras.Model):
        raise ModelError(f"{model.name} is a {type(model).__name__}; wrap it: keras.Sequential([keras.Input(...), it])")
    release(model)
    functional = traced_functional(keras, model)
    calls = list_calls(keras, model, functional)
    specs = _specs(model, functional, args)
    budget, share = _budget(memory)
    fixed = fixed_batch(model, functional)
    if fixed and (micro_batches or 1) > 1:
        raise OutcoreError(f"{model.name} cannot take micro-batches: {fixed}")
    parts = [micro_batches or 1]
    if not micro_batches and not fixed:
        parts += [n for n in _SPLITS if specs[0].shape[0] % n == 0]
    variables = _variables(model, optimizer)
    least: int | None = None
    plain, tried, changing = 0, 1, ""
    for number in parts:
        part = [_divided(spec, number) for spec in specs]
        standing = [*variables, *(_bytes(spec) for spec in specs)]
        try:
            if number > 1:  # the part that is cut out, and the sums of gradients
                check_splittable(keras, model, functional, specs, number)
                standing += [*(_bytes(spec) for spec in part), *(_size(v) for v in model.trainable_variables)]
            facts = step_facts(keras, model, part, calls)
            trial = FitTrial(keras, model, functional, calls, specs, facts, number, optimizer)
            trial.standing = standing = [*standing, *trial.target_bytes]
            whole = trial.peak((Segment(0, len(calls.calls)),))
            if number > 1:
                trial.check_parts()
        except OutcoreError:
            if least is None:
                raise
            break  # nobody has asked for parts, and they would be another training
        tried, plain, changing = number, plain or whole, facts.changing
        if share is not None:
            budget, share = int(share * plain), None
        chosen, smallest = choose(calls, facts, whole, budget, sum(standing), trial.peak, trial.run)
        trial.forget()
        least = min(least or smallest.budget_bytes, smallest.budget_bytes)
        if chosen is not None:
            plan = _plan(calls, chosen, tried, sum(variables), plain, budget)
            _install(keras, model, SegmentedCall(keras, functional, calls, chosen.segments, model), plan)
            if not quiet:
                print(f"outcore: {model.name}: {plan}{_other_numbers(model, plan)}", file=sys.stderr)
            return model
        if changing:
            break
    assert least is not None and budget is not None
    error = PlanError(
        f"{model.name} does not train within {format_bytes(budget)} on TensorFlow: the smallest peak found is "
        f"{format_bytes(least)} with {tried} micro-batches; give memory={least} or a smaller batch"
        + (
            ""
            if not changing or micro_batches or fixed
            else f", or micro_batches=2 ({changing} then sees parts of the batch)"
        )
    )
    error.least_bytes = least
    raise error


def within_options(given: Mapping[str, Any]) -> Any:
    """`within`, from the arguments of `outcore.within`; what TensorFlow does not have is refused."""
    passive: dict[str, tuple[Any, ...] | None] = {
        "kwargs": ({"training": True}, {}),
        "measure_s": None,
        "graphs": ("auto", False),
        "exact": None,
        "stream": (False,),
        "statistics": (False,),
        "compile": (False,),
    }
    for name, value in given.items():
        allowed = passive.get(name, ())
        if name in ("model", "args", "memory", "optimizer", "quiet") or value is None or allowed is None:
            continue
        if value not in allowed:
            raise OutcoreError(f"{name}= is not there for Keras models on TensorFlow; see outcore.keras")
    optimizer = given["optimizer"]
    state = float(optimizer) if isinstance(optimizer, (int, float)) else None
    return within(given["model"], given["args"], memory=given["memory"], optimizer=state, quiet=given["quiet"])


def _plan(
    calls: Calls, chosen: Choice, parts: int, variable_bytes: int, plain: int, budget: int | None
) -> TensorFlowPlan:
    names = tuple((calls.calls[s.start].path, calls.calls[s.stop - 1].path, s.recompute) for s in chosen.segments)
    return TensorFlowPlan(names, parts, chosen.work, variable_bytes, chosen.peak_bytes, plain, budget)


def _install(keras: Any, model: Any, call: SegmentedCall, plan: TensorFlowPlan) -> None:
    """Put a planned call, and what goes with it, on a model."""
    call.plan = plan
    model.__dict__["call"] = call
    make = type(model).make_train_function

    def make_train_function(force: bool = False) -> Any:
        model.jit_compile = False
        return make(model, force)

    model.__dict__["make_train_function"] = make_train_function
    if plan.micro_batches > 1:
        model.__dict__["train_step"] = accumulating_step(keras, model, call.functional, plan.micro_batches)
    _forget_functions(model)


def _other_numbers(model: Any, plan: TensorFlowPlan) -> str:
    """Why a model that draws random numbers draws others than plain training would; empty if it draws the same."""
    if not any("seed_generator" in v.path for v in model.non_trainable_variables):
        return ""
    said = "; random numbers are drawn for each micro-batch" if plan.micro_batches > 1 else ""
    return said + ("; random numbers are those of jit_compile=False, not of XLA" if model.jit_compile else "")


def release(model: Any) -> Any:
    """Undo `within`; returns the same model."""
    if isinstance(model.__dict__.get("call"), SegmentedCall):
        for name in ("call", "make_train_function", "train_step"):
            model.__dict__.pop(name, None)
        _forget_functions(model)
    return model


def memory_plan(model: Any) -> TensorFlowPlan:
    """What `within` has decided for a model."""
    call = model.__dict__.get("call")
    if not isinstance(call, SegmentedCall):
        raise OutcoreError("this model is not under outcore.within")
    if not isinstance(call.plan, TensorFlowPlan):
        raise OutcoreError("this model runs in tiles, under no plan")
    return call.plan


def _forget_functions(model: Any) -> None:
    """Traced functions hold what ``call`` was."""
    for name in ("train_function", "test_function", "predict_function"):
        with contextlib.suppress(AttributeError):
            setattr(model, name, None)


def _specs(model: Any, functional: Any, args: Any) -> list[Any]:
    """Shapes and types of the inputs, from an example or from shapes."""
    tf = importlib.import_module("tensorflow")
    if isinstance(args, (list, tuple)) and len(args) == 1 and isinstance(args[0], (list, tuple, dict)):
        if not all(isinstance(n, int) for n in args[0]):
            args = args[0]
    given = [args] if hasattr(args, "shape") else list(args.values()) if isinstance(args, dict) else list(args)
    declared = list(leaves(functional._inputs_struct))
    if isinstance(args, dict):
        given = [args[name] for name in sorted(args)]
    if len(given) != len(declared):
        raise OutcoreError(f"{model.name} takes {len(declared)} inputs; given were {len(given)}")
    made = []
    for one, tensor in zip(given, declared, strict=True):
        shape = tuple(int(n) for n in (one.shape if hasattr(one, "shape") else one))
        fits = len(shape) == len(tensor.shape) and all(b in (None, a) for a, b in zip(shape, tensor.shape, strict=True))
        if not fits:
            raise OutcoreError(f"{model.name} takes an input of shape {tuple(tensor.shape)}; given was {shape}")
        made.append(tf.TensorSpec(shape, tensor.dtype))
    return made


def _divided(spec: Any, parts: int) -> Any:
    tf = importlib.import_module("tensorflow")
    return tf.TensorSpec((math.ceil(spec.shape[0] / parts), *spec.shape[1:]), spec.dtype)


def _bytes(spec: Any) -> int:
    return int(math.prod(spec.shape)) * int(spec.dtype.size)


def _variables(model: Any, optimizer: float | None) -> list[int]:
    """The sizes of weights and of the optimizer's state; gradients are in the graph."""
    if optimizer is None:
        compiled = getattr(model, "optimizer", None)
        optimizer = 2.0 if compiled is None else _slots(compiled)
    trainable = [_size(v) for v in model.trainable_variables]
    slots = [n for _ in range(int(optimizer)) for n in trainable]
    return [*(_size(v) for v in model.variables), *slots, int((optimizer % 1) * sum(trainable))]


def _size(variable: Any) -> int:
    tf = importlib.import_module("tensorflow")
    return int(math.prod(variable.shape)) * int(tf.as_dtype(variable.dtype).size)


_SLOTS = {"SGD": 0.0, "Adagrad": 1.0, "RMSprop": 1.0, "Adadelta": 2.0, "Lion": 1.0, "Adafactor": 1.0}


def _slots(optimizer: Any) -> float:
    """State of a Keras optimizer over the size of the weights."""
    name = type(optimizer).__name__
    if name == "SGD":
        return 1.0 if getattr(optimizer, "momentum", 0) else 0.0
    if name == "RMSprop":
        return 1.0 + bool(getattr(optimizer, "momentum", 0)) + bool(getattr(optimizer, "centered", False))
    return _SLOTS.get(name, 3.0 if getattr(optimizer, "amsgrad", False) else 2.0)


def _budget(memory: str | int | None) -> tuple[int | None, float | None]:
    """A budget in bytes, or as a share of what plain training takes."""
    if isinstance(memory, str) and memory.strip().endswith("%"):
        with contextlib.suppress(ValueError):
            if (share := float(memory.strip()[:-1]) / 100) > 0:
                return None, share
        raise OutcoreError(f'memory={memory!r} is no share of what plain training takes; write memory="50%"')
    if isinstance(memory, (float, bool)):
        raise OutcoreError(f'memory={memory} says neither bytes nor a share; write memory="8GiB" or memory="50%"')
    return (parse_bytes(memory) if isinstance(memory, str) else memory), None
