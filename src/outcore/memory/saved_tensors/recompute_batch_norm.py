"""A batch norm made again from the statistics it kept, with the ReLU after it in the same pass.

Run again as it ran first, a norm passes over its memory three times (once for the statistics), and a ReLU in place
twice more. But autograd keeps mean and deviation of every norm anyway, so one pass will do: read the norm's input,
write what ReLU leaves of the normalised values.

The bits must be those of forward, and libraries round in different orders. So when a norm first runs, every order is
tried on its own numbers (a part of them at each end): with weights that tell the orders apart, which fresh ones (one
and zero) do not, and with its own. The order that gives the same bits both times is used from then on. Where none does,
the norm runs again as it is; unless the user accepts results that are *reassociated*. On a CPU, where the rounding of
an element depends on its place in a vector, only then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.graph.record.recording import Ref, Step
from outcore.graph.strides import has_known_format, known_format
from outcore.ops.registry import names

Statistics = tuple[torch.Tensor, torch.Tensor]
"""Mean and inverse deviation of every channel."""

Affine = tuple[torch.Tensor, torch.Tensor]
"""Weight and bias."""

ORDERS = 4
_TRIED = 2**20
"""Elements that an order is tried on, at each end."""
NORMS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d"}
RELUS = names("relu")


@dataclass(frozen=True, slots=True)
class BatchNormCall:
    """A batch norm in training, maybe with a ReLU that writes into its output."""

    call: str
    input: str
    output: str
    module: nn.Module
    relu: bool


def norm_of(steps: Sequence[Step], model: nn.Module, types: Mapping[str, str]) -> BatchNormCall | None:
    """The norm that a buffer's writers are, if they are one."""
    first, *rest = steps
    if (
        first.kind != "module"
        or types[first.name] not in NORMS
        or [types[s.name] in RELUS for s in rest]
        not in (
            [],
            [True],
        )
    ):
        return None
    module = model.get_submodule(first.target)
    given = first.args[0] if first.args else None
    if not isinstance(module, nn.modules.batchnorm._BatchNorm) or not isinstance(given, Ref) or given.kind != "value":
        return None
    if not (module.training or module.running_mean is None) or module.weight is None:
        return None
    return BatchNormCall(first.name, given.name, first.outputs[0], module, bool(rest))


@dataclass
class BatchNormRecompute:
    """How each norm of a model is made again."""

    reassociated: bool = False
    orders: dict[str, int | None] = field(default_factory=dict)
    """Call -> order of rounding; none where no order will do."""

    def statistics(
        self, norm: BatchNormCall, x: torch.Tensor, out: torch.Tensor, saved: Iterable[torch.Tensor]
    ) -> Statistics | None:
        """What a norm that has just run has left for making it again.

        Args:
            norm: which.
            x: what it read.
            out: what it wrote, before anything else writes there.
            saved: what autograd has kept of it.
        """
        if self.orders.get(norm.call, 0) is None:
            return None
        module: Any = norm.module
        own = (module.weight, module.bias, module.running_mean, module.running_var)
        found = _statistics(saved, x.shape[1], [t for t in own if t is not None])
        if norm.call not in self.orders:
            self.orders[norm.call] = self._order(module, x.detach(), out.detach(), found) if found else None
        return found if self.orders[norm.call] is not None else None

    def run(self, norm: BatchNormCall, x: torch.Tensor, statistics: Statistics) -> torch.Tensor:
        """Compute the output of a batch norm again, from its input and the statistics it kept."""
        order = self.orders[norm.call]
        assert order is not None
        return normalised(x, statistics, _affine(norm.module), order, relu=norm.relu)

    def _order(self, module: nn.Module, x: torch.Tensor, out: torch.Tensor, statistics: Statistics) -> int | None:
        """Which order of rounding gives the norm's own output bit for bit; None if none does."""
        if not (has_known_format(x) and out.stride() == x.stride() and out.dtype == x.dtype):
            return None
        if not x.is_cuda:
            return usual_order(x) if self.reassociated else None
        affine, parts = _affine(module), _ends(x, out)
        tries = [(part, want, statistics, affine) for part, want in parts]
        tries += [found for part, _ in parts if (found := _another(part, module)) is not None]
        with torch.no_grad():
            for order in range(ORDERS) if len(tries) == 2 * len(parts) else ():
                if all(torch.equal(normalised(p, s, a, order, relu=False), want) for p, want, s, a in tries):
                    return order
        return usual_order(x) if self.reassociated else None


def _affine(module: nn.Module) -> Affine:
    assert isinstance(module.weight, torch.Tensor) and isinstance(module.bias, torch.Tensor)
    return module.weight.detach(), module.bias.detach()


def _statistics(saved: Iterable[torch.Tensor], size: int, own: Iterable[torch.Tensor]) -> Statistics | None:
    """Mean and inverse deviation among what autograd has kept."""
    others = {t.data_ptr() for t in own}
    flat = [t for t in saved if t.dim() == 1 and t.is_floating_point()]
    for t in flat:
        if len(t) == 4 * size:  # of a norm that was fused with its ReLU: weights stand behind the statistics
            return t[:size], t[size : 2 * size]
    kept = [t for t in flat if len(t) == size and t.data_ptr() not in others]
    return (kept[0], kept[1]) if len(kept) == 2 else None


def _another(x: torch.Tensor, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor, Statistics, Affine] | None:
    """The same norm run with made-up weights, as a second case to compare: input, output, statistics, weights."""
    like = _affine(module)[0]
    count = x.shape[1]
    weight = torch.linspace(0.37, 1.93, count, dtype=like.dtype, device=like.device).requires_grad_()
    bias = torch.linspace(-0.71, 0.83, count, dtype=like.dtype, device=like.device)
    running = (torch.zeros_like(bias), torch.ones_like(bias))
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        out = F.batch_norm(x.detach().requires_grad_(), *running, weight, bias, True, 0.1, getattr(module, "eps", 1e-5))
    found = _statistics(saved, count, (weight, bias, *running))
    return (x, out.detach(), found, (weight.detach(), bias)) if found is not None else None


def usual_order(x: torch.Tensor) -> int:
    """The order of rounding that is fastest on a device, for where results need not be equal bit for bit."""
    return 0 if x.is_cuda else 2


def _ends(x: torch.Tensor, out: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A part at the beginning and one at the end of two tensors, as they lie in memory."""
    dim = max((d for d in range(x.dim()) if d != 1), key=lambda d: x.shape[d])
    count = max(1, min(x.shape[dim], _TRIED * x.shape[dim] // max(1, x.numel())))

    def part(tensor: torch.Tensor, start: int) -> torch.Tensor:
        cut = tensor.narrow(dim, start, count)
        return torch.empty_like(cut, memory_format=known_format(tensor)).copy_(cut)

    return [(part(x, start), part(out, start)) for start in {0, x.shape[dim] - count}]


def normalised(x: torch.Tensor, statistics: Statistics, affine: Affine, order: int, *, relu: bool) -> torch.Tensor:
    """Normalise, rounding in one of the known orders."""
    if x.is_cuda:
        from outcore.kernels.batch_norm_relu import normalise

        return normalise(x, *statistics, *affine, order, relu)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    m, s, w, b = (t.view(shape) for t in (*statistics, *affine))
    v = x.to(m.dtype)
    match order:
        case 0:
            y = w * (v - m) * s + b
        case 1:
            y = (v - m) * s * w + b
        case 2:
            y = torch.addcmul(b - m * (s * w), v, s * w)
        case _:
            y = (v - m) * (s * w) + b
    y = y.to(x.dtype)
    return y.relu_() if relu else y
