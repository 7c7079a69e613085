"""Convolutions with more elements than 32 bits can count, in bands of rows.

Beyond 2^31 elements cuDNN has only its slowest kernels left: on an H200 a 1x1 convolution of that size takes up to a
hundred times as long as one slightly smaller, a strided one ten seconds, and most need room for copies of all they read
and write. torch cuts a batch into parts that can be counted; a single image that is too large it cannot cut. Here its
output is computed in bands of rows, each from the rows that it depends on, with padding at true borders only:

    rows of the input      |-------------- band 0 ----|
                                                |--------- band 1 ---------|      as many rows more as the kernel is
    rows of the output     |------- band 0 ------|------ band 1 ------| ...       larger than its stride

In backward each band's gradient goes to the rows it came from, and the bands' gradients of the weight are added up.
That is another order of sums than one kernel's, so it is done only where the user accepts results that are
*reassociated*. Gradients of gradients do not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.graph import Graph
from outcore.graph.record.recording import Step
from outcore.memory.op_fusion.pattern import hooked

_COUNTED = 2**31 - 1
_BAND = 2**27
"""Elements of a band: half a gigabyte in single precision, which is all the extra memory it takes."""
_DEVICES = ("cuda",)


def in_bands(graph: Graph, steps: Mapping[str, Step], model: nn.Module) -> dict[str, Step]:
    """The steps that replace convolutions whose images have too many elements to count."""
    found = {}
    for name, call in graph.calls.items():
        if len(call.outputs) != 1 or not _plain(steps[name], model):
            continue
        shapes = [graph.values[v].shape for v in (*call.inputs, *call.outputs)]
        if any(_numbers(shape) > _COUNTED for shape in shapes):
            found[name] = replace(steps[name], kind="function", target=_Banded(model.get_submodule(steps[name].target)))
    return found


def _numbers(shape: tuple[int, ...] | torch.Size) -> int:
    """The elements of one image."""
    return torch.Size(shape[1:]).numel() if len(shape) == 4 else 0


def _plain(step: Step, model: nn.Module) -> bool:
    """Whether a step is a convolution and nothing else, in the precision of its input."""
    if step.kind != "module" or len(step.args) != 1 or step.kwargs or any(row[1] for row in step.context.autocast):
        return False
    module = model.get_submodule(step.target)
    if type(module) is not nn.Conv2d or hooked(module) or module.weight.device.type not in _DEVICES:
        return False
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


class _Banded:
    """A convolution of the model, computed in bands."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        m: Any = self.module
        result: torch.Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
            x, m.weight, m.bias, m.stride, m.padding, m.dilation, m.groups
        )
        return result


class _Rows:
    """How the rows of an output depend on those of an input."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any, dilation: Any) -> None:
        self.height, self.stride, self.padding = x.shape[2], stride[0], padding[0]
        self.reach = dilation[0] * (weight.shape[2] - 1) + 1
        across = dilation[1] * (weight.shape[3] - 1) + 1
        self.rows = (self.height + 2 * self.padding - self.reach) // self.stride + 1
        self.columns = (x.shape[3] + 2 * padding[1] - across) // stride[1] + 1
        numbers = x.shape[0] * max(x.shape[1] * x.shape[3] * self.stride, weight.shape[0] * self.columns)
        self.step = max(1, _BAND // numbers)

    def bands(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """For each band: its rows of the output and of the input, and the rows of padding above and below."""
        for first in range(0, self.rows, self.step):
            last = min(first + self.step, self.rows)
            top = first * self.stride - self.padding
            bottom = (last - 1) * self.stride - self.padding + self.reach
            low, high = min(max(top, 0), self.height), min(max(bottom, 0), self.height)
            above = min(max(-top, 0), bottom - top)
            yield first, last, low, high, above, bottom - top - above - (high - low)


def _band(x: torch.Tensor, low: int, high: int, above: int, below: int) -> torch.Tensor:
    band = x[:, :, low:high]
    return F.pad(band, (0, 0, above, below)) if above or below else band


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
    ) -> torch.Tensor:
        """The output, band by band."""
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.bias = (stride, padding, dilation, groups), None if bias is None else [bias.shape[0]]
        rows = _Rows(x, weight, stride, padding, dilation)
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        form = torch.channels_last if last else torch.contiguous_format
        shape = (x.shape[0], weight.shape[0], rows.rows, rows.columns)
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)
        for first, end, *where in rows.bands():
            band = _band(x, *where)
            out[:, :, first:end] = F.conv2d(band, weight, bias, stride, (0, padding[1]), dilation, groups)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Send every band's gradient to the rows it was computed from, and add up those of the weight."""
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        back = torch.zeros_like(x) if wanted[0] else None
        totals: list[torch.Tensor | None] = [None, None]
        rows = _Rows(x, weight, stride, padding, dilation)
        for first, end, low, high, above, below in rows.bands():
            found = torch.ops.aten.convolution_backward(
                gradient[:, :, first:end], _band(x, low, high, above, below), weight, ctx.bias, list(stride),
                [0, padding[1]], list(dilation), False, [0, 0], groups, wanted,
            )  # fmt: skip
            if back is not None:
                back[:, :, low:high] += found[0][:, :, above : above + high - low]
            for i, part in enumerate(found[1:]):
                if part is not None and wanted[i + 1]:
                    totals[i] = _added(totals[i], part)
        return back, *(None if t is None else t.to(weight.dtype) for t in totals), None, None, None, None


def _added(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    """The running sum of parts; half precision is summed in single."""
    part = part.to(torch.promote_types(part.dtype, torch.float32))
    return part if total is None else total.add_(part)
