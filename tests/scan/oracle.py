"""Runs a module of torch.nn and ours on the same data and compares everything that comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import outcore.scan as scan
from outcore.scan import Options

SCAN = Options(backward="scan")


def pair(kind: str, inputs: int, hidden: int, options: Options = SCAN, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """torch.nn's module and ours, with the same parameters."""
    kwargs = {"dtype": torch.float64} | kwargs
    torch.manual_seed(0)
    reference = getattr(nn, kind)(inputs, hidden, **kwargs)
    ours = getattr(scan, kind)(inputs, hidden, options=options, **kwargs)
    ours.load_state_dict(reference.state_dict())
    return reference, ours


def everything(module: Any, x: Tensor, state: Any = None, lengths: list[int] | None = None) -> dict[str, Tensor]:
    """Outputs, final states, and the gradients of input, initial states and parameters under a random loss."""
    x = x.detach().clone().requires_grad_()
    given = state if isinstance(state, tuple) else () if state is None else (state,)
    given = tuple(part.detach().clone().requires_grad_() for part in given)
    inputs: Any = x
    if lengths is not None:
        inputs = pack_padded_sequence(x, lengths, enforce_sorted=False, batch_first=module.batch_first)
    torch.manual_seed(1)  # dropout
    output, final = module(inputs, (given if isinstance(state, tuple) else given[0]) if given else None)
    output = output.data if isinstance(output, PackedSequence) else output
    finals = final if isinstance(final, tuple) else (final,)
    torch.manual_seed(2)
    # Drawn in float64, so that a module in another precision gets the same loss.
    weights = [torch.randn(part.shape, dtype=torch.float64, device=part.device) for part in (output, *finals)]
    loss = sum((part * weight.to(part.dtype)).sum() for part, weight in zip((output, *finals), weights, strict=True))
    names = ["x", *(f"state{i}" for i in range(len(given))), *(name for name, _ in module.named_parameters())]
    grads = torch.autograd.grad(loss, [x, *given, *module.parameters()])  # type: ignore[arg-type]
    found = {"output": output.detach()} | {f"final{i}": part.detach() for i, part in enumerate(finals)}
    return found | {f"grad {name}": grad for name, grad in zip(names, grads, strict=True)}


def largest_error(reference: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Largest difference, relative to the largest number of each tensor; shapes and dtypes must be the same."""
    assert reference.keys() == found.keys()
    worst = 0.0
    for name, expected in reference.items():
        assert found[name].shape == expected.shape, name
        error = (found[name].to(expected.dtype) - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        assert torch.isfinite(error), name
        worst = max(worst, float(error))
    return worst


def initial(module: Any, batch: int | None) -> Any:
    """Random initial states for a module; without a batch dimension where `batch` is none."""
    torch.manual_seed(3)
    layers = module.num_layers * (1 + module.bidirectional)
    sizes = (module.proj_size or module.hidden_size, module.hidden_size)
    shapes = [(layers, size) if batch is None else (layers, batch, size) for size in sizes]
    dtype = next(module.parameters()).dtype
    states = tuple(torch.randn(shape, dtype=dtype) for shape in shapes)
    return states if module.mode == "LSTM" else states[0]
