"""The names and kinds of blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from outcore.graph.parts import BlockKind
from outcore.graph.record.recording import Ref

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


def kind_of(module: nn.Module) -> BlockKind:
    """A torch.nn layer is a leaf, a part that must stay whole is opaque, everything else is opened."""
    children = [name for name, _ in module.named_children() if name != "parametrizations"]
    hooked = bool(module._backward_hooks or module._backward_pre_hooks)
    if isinstance(module, torch.jit.ScriptModule) or is_compiled(module) or (children and hooked):
        return "opaque"
    if children or isinstance(module, _CONTAINERS):
        return "container"
    forward_of = getattr(type(module).forward, "__module__", "")
    is_layer = forward_of.startswith("torch.nn.") and forward_of != "torch.nn.modules.module"
    return "module" if is_layer or parametrize.is_parametrized(module) or hooked else "container"


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs compiled code."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def paths(model: nn.Module) -> dict[nn.Module, str]:
    """Each module of the model with the first name it is registered under."""
    return {module: name for name, module in model.named_modules()}


def function_name(func: Callable[..., Any]) -> str:
    """``add`` for ``torch.add``, ``Tensor.__add__`` and ``Tensor.__radd__``; ``T`` for the property."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        attribute = getattr(func.__self__, "__name__", name)  # type: ignore[attr-defined]
        return str(attribute) if name == "__get__" else f"set_{attribute}"
    if in_place := re.fullmatch(r"__i(add|sub|mul|truediv|floordiv|pow|and|or|xor|mod|matmul)__", name):
        return f"{in_place[1]}_"
    if reflected := re.fullmatch(r"__r(add|sub|mul|truediv|div|floordiv|pow|and|or|xor|mod|matmul)__", name):
        return f"r{reflected[1]}"
    return name.strip("_") + ("_" if name.endswith("_") and not name.endswith("__") else "")


def literals(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The arguments that are not tensors, as one would type them."""
    shown = [text for a in args if (text := _literal(a))]
    shown += [f"{key}={text}" for key, a in kwargs.items() if (text := _literal(a))]
    text = ", ".join(shown)
    return text if len(text) <= 120 else text[:119] + "…"


def _literal(value: Any) -> str:
    if isinstance(value, Ref) or callable(value):
        return ""
    if isinstance(value, _PLAIN):
        return repr(value).removeprefix("torch.")
    if isinstance(value, slice):
        return ":".join(
            "" if v is None else _literal(v) or "·"
            for v in (value.start, value.stop, value.step)[: 2 + (value.step is not None)]
        )
    if value is Ellipsis:
        return "..."
    if isinstance(value, (tuple, list)):
        inside = [_literal(v) for v in value]
        return f"({', '.join(inside)})" if value and all(inside) else ""
    return ""
