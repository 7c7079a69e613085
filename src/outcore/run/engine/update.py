"""From gradients to new weights: reduction over copies, one loss scale, clipping over all stages, the user's optimizer.

Reductions run while other stages still compute: `reduce` starts one, `finish_reductions` waits for all. The gradients
of parameters with the same owners are sent as rows, together with a flag per parameter that says whether it has one:
a parameter that nothing used this step keeps no gradient at all, as in plain PyTorch, instead of one that is zero.
Afterwards the gradients are views of these rows. Every copy gets the same sums, bit for bit, and takes the same step.

Clipping and the search for infinities look at all parameters of the model once, wherever they are: the norms of all
ranks are put into one row in the order of the model's parameters, and every rank computes the same total from it, with
the same operations as `torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outcore.errors import EngineError
from outcore.loss_scale import LossScale
from outcore.program import Reduce
from outcore.run.engine.setup import check_gradients
from outcore.run.ranks.world import World
from outcore.run.stage.parameter_owners import ParameterOwners, SharedParameters
from outcore.run.transport.all_reduce import AllReduce, DirectAllReduce, GlooAllReduce
from outcore.run.transport.shared_memory import SharedRows

_TAGS = 1 << 20
"""The first tag above those of a program's transfers."""
_BUCKET_BYTES = 16 << 20
"""About as much is sent in one row: the others can add it while the next one is filled, and host memory of that size is
used again in the next step (`outcore.machine.host_allocator`)."""
_BY_GLOO = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))


@dataclass(slots=True)
class _Started:
    share: SharedParameters
    rows: list[tuple[torch.Tensor, list[str], AllReduce]]
    """The row on its device, the names of its parameters, the all-reduce under way."""
    began: float


class GradientUpdate:
    """Reduces, unscales and clips gradients and steps the optimizer, on one rank."""

    def __init__(
        self,
        world: World,
        owners: ParameterOwners,
        parameters: Mapping[str, nn.Parameter],
        names: Sequence[str],
        groups: Mapping[tuple[int, ...], Any],
        *,
        clip_norm: float | None,
        scale: LossScale | None,
        dtypes: set[torch.dtype],
        shared_rows: SharedRows | None,
    ) -> None:
        self.world, self.owners, self.parameters, self.names = world, owners, parameters, names
        self.clip_norm, self.scale = clip_norm, scale
        self.optimizer: torch.optim.Optimizer | None = None
        self.norm: float | None = None
        """The norm of all gradients in the last step, before clipping; known where clipping is on."""
        self.skipped = 0
        """Steps left out because of an overflow."""
        self.on_reduced: Callable[[SharedParameters, float, float, int], None] = lambda *_: None
        """Called with begin, end and bytes of every reduction."""
        self.before_step: Callable[[], None] = lambda: None
        """Called when all gradients are complete, unscaled and clipped."""
        self.take_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: optimizer.step()
        """Runs the optimizer's step."""
        self.make_row: Callable[[nn.Parameter, int, torch.dtype], torch.Tensor] = _row_beside
        """Allocates a row of so many elements for the gradients of parameters of which one is given."""
        self._groups, self._shared_rows = groups, shared_rows
        self._owner = owners.owner()
        self._started: list[_Started] = []
        self._has_learned = False
        # Norms of all parameters are added in the widest of their dtypes, the same on every rank.
        self._norm_dtype = torch.float64 if torch.float64 in dtypes else torch.float32

    def reduce(self, instruction: Reduce) -> None:
        """Start to add the gradients of a stage over the ranks that hold it."""
        for share in self.owners.shares:
            if share.stages == (instruction.stage,):
                self._start(share)

    def finish_reductions(self) -> None:
        """Add up the gradients of tied copies, and wait for all reductions."""
        for share in self.owners.shares:
            if share.tied and self.world.rank in share.ranks and len(share.ranks) > 1:
                self._start(share)
        for started in self._started:
            for _, _, total in started.rows:
                with self.world.place.communicating():
                    total.add()
        while self._started:
            self._finish(self._started.pop(0))

    def step(self) -> None:
        """Unscale, clip and step, when all reductions are finished."""
        if not self._has_learned and self.optimizer is not None:
            held = torch.tensor([float(sum(p.grad is not None for p in self.parameters.values()))], device="cpu")
            check_gradients(float(self.world.sum_(held)), EngineError)
            self._has_learned = True
        overflowed = self._unscale() if self.scale is not None else False
        if self.clip_norm is not None and not overflowed:
            self._clip(self.clip_norm)
        self.before_step()
        if overflowed:
            self.skipped += 1
        elif self.optimizer is not None:
            self.take_step(self.optimizer)
        if self.scale is not None:
            self.scale.update(overflowed)
        self.zero()

    def zero(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def abandon(self) -> None:
        """Drop what is under way after a failure."""
        self.world.leftovers += self._started
        self._started.clear()

    def close(self) -> None:
        """Close all connections."""
        self.abandon()
        self._groups, self._shared_rows = {}, None

    # Reduction

    def _start(self, share: SharedParameters) -> None:
        rows = []
        began = time.perf_counter()
        tag = _TAGS + self.owners.shares.index(share)
        for dtype, names in self._buckets(share):
            row = self._row(names, dtype if dtype in _BY_GLOO else torch.float32)
            with self.world.place.communicating():
                rows.append((row, names, self._add_up(row, share, tag)))
        self._started.append(_Started(share, rows, began))

    def _buckets(self, share: SharedParameters) -> Iterator[tuple[torch.dtype, list[str]]]:
        """Parameters that are sent as one row, the same on every rank."""
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name in share.names:
            if self.parameters[name].requires_grad:
                by_dtype.setdefault(self.parameters[name].dtype, []).append(name)
        for dtype, names in by_dtype.items():
            bucket: list[str] = []
            filled = 0
            for name in names:
                nbytes = self.parameters[name].nbytes
                if bucket and filled + nbytes > _BUCKET_BYTES:
                    yield dtype, bucket
                    bucket, filled = [], 0
                bucket.append(name)
                filled += nbytes
            yield dtype, bucket

    def _add_up(self, row: torch.Tensor, share: SharedParameters, tag: int) -> AllReduce:
        if (shared := self._shared_rows) is not None and shared.connect(share.ranks, row.nbytes):
            return DirectAllReduce(row, self.world.rank, share.ranks, tag, shared)
        return GlooAllReduce(row, self._groups[share.stages], self.world.watched_wait)

    def _row(self, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """Gradients one after the other, then a flag for each: 1 where there is one."""
        parameters = [self.parameters[name] for name in names]
        total = sum(p.numel() for p in parameters)
        row = self.make_row(parameters[0], total + len(names), dtype)
        at = 0
        for p in parameters:
            part = row[at : at + p.numel()].view(p.shape)
            part.zero_() if p.grad is None else part.copy_(p.grad)
            p_has = p.grad is not None
            p.grad = None
            row[total] = float(p_has)
            total, at = total + 1, at + p.numel()
        return row

    def _finish(self, started: _Started) -> None:
        nbytes = 0
        for row, names, total in started.rows:
            with self.world.place.communicating():
                total.wait()
            nbytes += row.numel() * row.element_size()
            marks = row[-len(names) :].tolist()
            at = 0
            for name, mark in zip(names, marks, strict=True):
                p = self.parameters[name]
                if mark:
                    p.grad = row[at : at + p.numel()].view(p.shape).to(p.dtype)
                at += p.numel()
        self.on_reduced(started.share, started.began, time.perf_counter(), nbytes)

    # Over all parameters

    def _unscale(self) -> bool:
        """Divide by the loss scale; returns whether any gradient of any rank is not finite."""
        assert self.scale is not None
        bad = torch.zeros(1, device="cpu")
        factor = 1.0 / self.scale.scale
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
                bad += float(not bool(torch.isfinite(parameter.grad).all()))
        return bool(self.world.sum_(bad).item())

    def _clip(self, limit: float) -> None:
        norms = torch.zeros(len(self.names), dtype=torch.float64, device="cpu")
        for i, name in enumerate(self.names):
            parameter = self.parameters.get(name)
            if parameter is not None and parameter.grad is not None and self._owner[name] == self.world.rank:
                norms[i] = torch.linalg.vector_norm(parameter.grad).item()
        norms = self.world.sum_(norms)
        total = torch.linalg.vector_norm(norms.to(self._norm_dtype))
        self.norm = float(total)
        if not torch.isfinite(total):
            raise EngineError(f"the norm of all gradients is {self.norm}; the loss or the model has overflowed")
        factor = (limit / (total + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))


def _row_beside(parameter: nn.Parameter, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device=parameter.device)
