"""Other ways of training within less memory, each set as well as its users would set it.

A way takes a training (`training.Training`) and changes what runs. Names say what is set: `checkpoint coarse` and
`checkpoint fine` (`torch.utils.checkpoint`, random state saved only where a part draws), `selective coarse` (the same
with a policy that keeps matrix products, attention and convolutions), `save_on_cpu` (pinned), `offload 1.0` (copies
beside the computation, that share of the bytes: `offload_peer`), `compile 0.5` (an activation memory budget),
`compile reduce-overhead` (CUDA graphs). `... graphs` is the whole step as one CUDA graph.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.frontier.networks import draws
from benchmarks.frontier.offload_peer import OverlappingOffload
from benchmarks.frontier.training import Case, Training

__all__ = ["apply", "can_be_graph"]

_KEPT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm addmm bmm baddbmm convolution _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_flash_attention_for_cpu"
    ).split()
)


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(parts: list[nn.Module], selective: bool) -> None:
    """A checkpoint around every part."""
    context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_products)}
    for module in parts:
        inner, options = module.forward, {"use_reentrant": False, "preserve_rng_state": draws(module)}
        options |= context if selective else {}

        def forward(
            self: nn.Module, *args: Any, inner: Callable[..., Any] = inner, options: Any = options, **kwargs: Any
        ) -> Any:
            args = tuple(list(a) if isinstance(a, list) else a for a in args)  # DenseNet's lists grow after the call
            return checkpoint(inner, *args, **options, **kwargs)

        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def _saved_on_cpu(training: Training) -> None:
    inner, pinned = training.run, training.device == "cuda"

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            return inner(*args, **kwargs)

    training.run = run


def _offloaded(training: Training, share: float) -> None:
    inner, offload = training.run, OverlappingOffload(training.model, share)

    def run(*args: Any, **kwargs: Any) -> Any:
        with offload:
            return inner(*args, **kwargs)

    training.run = run


def _compiled(training: Training, how: str) -> None:
    import torch._functorch.config as functorch

    mode = None
    if how == "reduce-overhead":
        mode, training.before_step = how, torch.compiler.cudagraph_mark_step_begin
    else:
        functorch.activation_memory_budget = float(how)
    training.run = torch.compile(training.model, mode=mode, dynamic=False)


def can_be_graph(case: Case, way: str, model: nn.Module) -> bool:
    """Whether a step may be recorded: a checkpoint that saves the random state reads it on the host."""
    return not (way.startswith(("checkpoint", "selective")) and draws(model))


def apply(case: Case, way: str, training: Training) -> None:
    """Make a training one of this way; `graphs` at the end of its name is left to the caller."""
    kind, *more = way.removesuffix(" graphs").split()
    if kind in ("checkpoint", "selective"):
        network: Any = training.model.network
        _checkpointed(getattr(case.network, more[0])(network), kind == "selective")
    elif kind == "save_on_cpu":
        _saved_on_cpu(training)
    elif kind == "offload":
        _offloaded(training, float(more[0]))
    elif kind == "compile":
        _compiled(training, more[0])
    elif kind != "plain":
        raise ValueError(f"no way of training is called {way!r}")
