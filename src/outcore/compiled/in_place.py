"""A compiled forward in the place of a model's own."""

from __future__ import annotations

from typing import Any

from torch import nn

from outcore.compiled.compiled_forward import CompiledForward
from outcore.compiled.plan import CompiledPlan
from outcore.compiled.settings import CompileSettings

__all__ = ["forward_of", "install", "install_compiled_forward"]


def forward_of(
    model: nn.Module, settings: CompileSettings, kind: type[CompiledForward] = CompiledForward
) -> CompiledForward:
    """A compiled forward for a model; one that was compiled already is planned anew."""
    compiled_before = isinstance(getattr(model, "_orig_mod", None), nn.Module)
    return kind(model, None if compiled_before else model.__dict__.get("forward"), settings)


def install(forward: CompiledForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledPlan:
    """Compile a forward for a call, and put it in its model's place.

    Args:
        forward: of the model.
        args: of a call.
        kwargs: of a call.

    Raises:
        CompilationError: torch.compile cannot do it; the model is as it was.
        PlanError: the budget is too small.
    """
    plan, model = forward.compile_first(args, kwargs), forward.model
    for name in ("forward", "_compiled_call_impl"):
        if name in model.__dict__:
            forward.before[name] = model.__dict__.pop(name)
    if "_compiled_call_impl" in forward.before:
        model.__dict__["_compiled_call_impl"] = None
    model.__dict__["forward"] = forward
    return plan


def install_compiled_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: CompileSettings
) -> CompiledPlan:
    """Put a compiled forward in a model's place; as `install`."""
    return install(forward_of(model, settings), args, kwargs)
