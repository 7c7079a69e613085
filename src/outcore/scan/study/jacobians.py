"""Sparse Jacobians of layers, exact: which output depends on which input, and how much.

For one sample, flattened. A convolution's Jacobian has its weights at places that follow from the window
alone, a ReLU's is diagonal, a max-pool's has one 1 per output. They are written down directly in compressed
rows (CSR), without a run of autograd per output, so that a chain of layers can be scanned
(`outcore.scan.study.jacobian_scan`) or its sparsity studied.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outcore.errors import ScanError


def conv_jacobian(
    weight: Tensor,
    size: Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """The Jacobian of a convolution in one, two or three dimensions.

    >>> conv_jacobian(torch.ones(1, 1, 2), [3]).to_dense()
    tensor([[1., 1., 0.],
            [0., 1., 1.]])

    Args:
        weight: ``[out, in / groups, window...]``.
        size: of the input, without channels.
        stride: as in `torch.nn.functional.conv2d`, like the others.
        padding: likewise; ``"same"`` and ``"valid"`` too.
        dilation: likewise.
        groups: likewise.
    """
    dims = weight.dim() - 2
    window, stride, dilation = tuple(weight.shape[2:]), _each(stride, dims), _each(dilation, dims)
    if len(size) != dims:
        raise ScanError(f"a weight of shape {tuple(weight.shape)} needs an input of {dims} dimensions, not {len(size)}")
    channels = weight.shape[1] * groups
    places = _windows(channels, size, window, stride, _pads(padding, window, dilation), dilation)
    out = weight.shape[0]
    positions = places.shape[1]
    # [groups, out / groups, positions, in / groups * window]: columns rise within each row.
    columns = places.view(groups, weight.shape[1], positions, -1).transpose(1, 2).flatten(2)
    columns = columns.unsqueeze(1).expand(-1, out // groups, -1, -1).reshape(out * positions, -1)
    values = weight.detach().flatten(1).unsqueeze(1).expand(-1, positions, -1).reshape(out * positions, -1)
    return _csr(columns.to(weight.device), values, channels * math.prod(size))


def max_pool_jacobian(
    x: Tensor,
    window: int | Sequence[int],
    *,
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """The Jacobian of max-pooling at one sample ``[channels, size...]``: a 1 where each maximum came from."""
    pool: Any = {2: F.max_pool1d, 3: F.max_pool2d, 4: F.max_pool3d}[x.dim()]
    _, found = pool(
        x.detach().unsqueeze(0), window, stride, padding, dilation, ceil_mode=ceil_mode, return_indices=True
    )
    inside = math.prod(x.shape[1:])
    offset = torch.arange(x.shape[0], device=x.device).view(-1, *[1] * (x.dim() - 1)) * inside
    columns = (found[0] + offset).reshape(-1, 1)
    return _csr(columns, torch.ones_like(columns, dtype=x.dtype), x.numel())


def average_pool_jacobian(
    shape: Sequence[int],
    window: int | Sequence[int],
    *,
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The Jacobian of average-pooling of inputs ``[channels, size...]``; padding counts in the average."""
    dims = len(shape) - 1
    window, padding = _each(window, dims), _each(padding, dims)
    stride = window if stride is None else _each(stride, dims)
    pads = [(p, p) for p in padding]
    places = _windows(shape[0], shape[1:], window, stride, pads, (1,) * dims)
    columns = places.reshape(-1, math.prod(window))
    values = torch.full(columns.shape, 1 / math.prod(window), dtype=dtype or torch.get_default_dtype(), device="cpu")
    return _csr(columns, values, math.prod(shape))


def diagonal_jacobian(slope: Tensor) -> Tensor:
    """The Jacobian of an element-wise function with this derivative; of ReLU, ``(x > 0).to(x.dtype)``."""
    n = slope.numel()
    return _csr(torch.arange(n, device=slope.device).view(n, 1), slope.detach().reshape(n, 1), n)


def jacobian_of(module: nn.Module, x: Tensor) -> Tensor:
    """The Jacobian of a layer at one sample, as sparse rows.

    >>> jacobian_of(nn.ReLU(), torch.tensor([-1.0, 2.0])).to_dense()
    tensor([[0., 0.],
            [0., 1.]])

    Args:
        module: a convolution, max- or average-pooling, ReLU, batch normalisation in eval mode, dropout in
            eval mode, flatten, identity or linear layer.
        x: the input without a batch dimension.

    Raises:
        ScanError: another layer.
    """
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        padding: Any = module.padding
        return conv_jacobian(
            module.weight, x.shape[1:], stride=module.stride, padding=padding, dilation=module.dilation,
            groups=module.groups,
        )  # fmt: skip
    if isinstance(module, nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d):
        return max_pool_jacobian(
            x, module.kernel_size, stride=module.stride, padding=module.padding, dilation=module.dilation,
            ceil_mode=module.ceil_mode,
        )  # fmt: skip
    if isinstance(module, nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d) and not module.ceil_mode:
        if module.count_include_pad and getattr(module, "divisor_override", None) is None:
            return average_pool_jacobian(
                x.shape, module.kernel_size, stride=module.stride, padding=module.padding, dtype=x.dtype
            )
    if isinstance(module, nn.ReLU):
        return diagonal_jacobian((x > 0).to(x.dtype))
    if isinstance(module, nn.Flatten | nn.Identity) or (isinstance(module, nn.Dropout) and not module.training):
        return diagonal_jacobian(torch.ones_like(x))
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and not module.training:
        if module.running_var is not None:
            slope = (module.running_var + module.eps).rsqrt().to(x.dtype)
            slope = slope if module.weight is None else slope * module.weight.detach()
            return diagonal_jacobian(slope.view(-1, *[1] * (x.dim() - 1)).expand_as(x))
    if isinstance(module, nn.Linear) and x.dim() == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return module.weight.detach().to_sparse_csr()
    raise ScanError(
        f"no Jacobian is known for {module} at an input of shape {tuple(x.shape)}; known are convolutions, "
        "ReLU, max- and average-pooling, linear layers, flatten, and batch normalisation and dropout in eval "
        "mode"
    )


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * dims if len(given) == 1 else given


def _pads(padding: int | Sequence[int] | str, window: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    if padding == "valid":
        return [(0, 0)] * len(window)
    if padding == "same":
        whole = [d * (k - 1) for k, d in zip(window, dilation, strict=True)]
        return [(w // 2, w - w // 2) for w in whole]
    assert not isinstance(padding, str)
    return [(p, p) for p in _each(padding, len(window))]


def _windows(
    channels: int,
    size: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> Tensor:
    """For every channel and output position the flat input places of its window, -1 in the padding."""
    places = torch.arange(channels * math.prod(size), device="cpu").view(channels, *size)
    places = F.pad(places, [*itertools.chain(*reversed(list(pads)))], value=-1)
    for i, (k, s, d) in enumerate(zip(window, stride, dilation, strict=True)):
        places = places.unfold(1 + i, d * (k - 1) + 1, s)[..., ::d]
    dims = len(window)
    return places.reshape(channels, math.prod(places.shape[1 : 1 + dims]), math.prod(window))


def _csr(columns: Tensor, values: Tensor, width: int) -> Tensor:
    """Rows of columns and values as CSR, without places of column -1."""
    real = columns >= 0
    starts = F.pad(real.sum(1).cumsum(0), (1, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls its CSR support beta
        return torch.sparse_csr_tensor(starts, columns[real], values[real], (len(columns), width))
