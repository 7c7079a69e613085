"""Programs drawn at random that do to logits what users do: look, view, write, hook, reduce, differentiate, step."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from outcore.errors import OutcoreError

COLUMNS = 11
Make = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Run:
    """One run of a program: the same draws whatever makes the logits."""

    def __init__(self, seed: int, make: Make) -> None:
        self.draw, self.seed = random.Random(seed), seed
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.normal = normal
        leading = self.draw.choice([(6,), (3, 5), (2, 3, 4), (1, 4)])
        self.tied = self.draw.random() < 0.3
        frozen = self.draw.choice(["none", "none", "none", "weight", "input"])
        self.embedding = normal(COLUMNS, 5).requires_grad_(frozen != "weight")
        self.bias = normal(COLUMNS).requires_grad_() if self.draw.random() < 0.5 else None
        self.x = normal(*leading, 5).requires_grad_(frozen != "input")
        hidden = torch.tanh(self.x) if not self.tied else torch.tanh(self.x) + self.embedding[: leading[-1]].tanh()
        self.hidden = hidden
        self.seen: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.wrote = self.hooked = self.refused = False
        self.pool = [make(hidden, self.embedding, self.bias)]

    def see(self, value: torch.Tensor) -> None:
        """Remember what was observed."""
        self.seen.append(value.detach().clone().double())

    def any(self) -> torch.Tensor:
        """One of the tensors there are, the logits most often."""
        return self.draw.choice([self.pool[0], *self.pool, self.pool[-1]])

    def leaves(self) -> list[torch.Tensor]:
        """What gradients are compared of."""
        return [t for t in (self.x, self.embedding, self.bias) if t is not None and t.requires_grad]

    def targets(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        """Classes for a tensor whose columns are in a dimension; some ignored."""
        shape = [s for d, s in enumerate(t.shape) if d != dim]
        found = torch.randint(0, t.shape[dim], shape, generator=torch.Generator().manual_seed(self.seed + 1))
        found.view(-1)[:: self.draw.choice([2, 3, 100])] = -100 if self.draw.random() < 0.5 else 0
        return found


def rearrange(run: Run) -> None:
    t = run.any()
    options: list[Callable[[], torch.Tensor]] = [
        lambda: t.reshape(-1, t.shape[-1]),
        lambda: t.view(-1, t.shape[-1]),
        lambda: t[..., :-1, :].contiguous(),
        lambda: t[..., 1:, :],
        lambda: t[0],
        lambda: t[..., 2:7],
        lambda: t[..., -1, :],
        lambda: t[None],
        lambda: t.transpose(0, 1),
        lambda: t.transpose(-1, -2),
        lambda: t.permute(*reversed(range(t.dim()))),
        lambda: t.movedim(-1, 0),
        lambda: t.flatten(0, 1),
        lambda: t.unsqueeze(0).squeeze(0),
        lambda: t.clone(),
        lambda: t.detach(),
        lambda: t.contiguous(),
        lambda: t.narrow(0, 0, 1),
        lambda: t.select(0, 0),
        lambda: torch.chunk(t, 2)[0],
        lambda: t.mT,
        lambda: t[torch.arange(t.shape[0]) % 2 == 0],
        lambda: t.double(),
        lambda: t.to(torch.float64),
        lambda: t.view_as(t),
        lambda: t.expand_as(t),
    ]
    run.pool.append(run.draw.choice(options)())


def compute(run: Run) -> None:
    t = run.any()
    options: list[Callable[[], torch.Tensor]] = [
        lambda: t * 0.5,
        lambda: 2 * t,
        lambda: t / 3.0,
        lambda: t + 1,
        lambda: 1 - t,
        lambda: 30 * torch.tanh(t / 30),
        lambda: F.relu(t),
        lambda: F.softmax(t, -1),
        lambda: t.log_softmax(-1),
        lambda: torch.log_softmax(t, dim=0),
        lambda: t.softmax(1),
        lambda: F.gelu(t),
        lambda: t + t.detach().mean(),
        lambda: torch.where(t > 0, t, 0.1 * t),
        lambda: t * run.embedding.mean(),
        lambda: t.clamp(-1, 1),
        lambda: -t,
    ]
    run.pool.append(run.draw.choice(options)())


def look(run: Run) -> None:
    t = run.any()
    options: list[Callable[[], Any]] = [
        lambda: run.see(t.argmax(-1)),
        lambda: run.see(t.detach().argmax(dim=-1)),
        lambda: run.see(torch.tensor(t.sum().item())),
        lambda: run.see(t),
        lambda: run.see(torch.from_numpy(t.detach().numpy())),
        lambda: str(t),
        lambda: run.see(torch.tensor(t.tolist())),
        lambda: run.see(t.topk(2, -1)[0]),
        lambda: run.see(t.max(-1)[1]),
        lambda: run.see(t.std()),
        lambda: run.see(t.amax(-1, keepdim=True)),
        lambda: run.see(torch.tensor(list(t.shape))),
        lambda: run.see(t.data),
        lambda: run.see(torch.stack([t, t])),
        lambda: run.see(next(iter(t))),
        lambda: hash(t),
    ]
    with torch.no_grad() if run.draw.random() < 0.5 else torch.enable_grad():
        run.draw.choice(options)()


def write(run: Run) -> None:
    t = run.any()
    if run.hooked:
        return
    options: list[Callable[[], Any]] = [
        lambda: t.mul_(2),
        lambda: t.add_(1),
        lambda: t.__setitem__((..., 0), 0.0),
        lambda: t[..., :1].zero_(),
        lambda: t.relu_(),
        lambda: t.masked_fill_(t > 1, 0.5),
        lambda: t.view(-1).mul_(3),
        lambda: torch.tanh(t, out=None),
    ]
    run.draw.choice(options)()
    run.wrote = True


def lose(run: Run) -> None:
    t = run.any()
    columns = t.shape[-1]
    weight = torch.linspace(0.5, 2, columns, dtype=torch.float64)
    beside = torch.linspace(0, 1, t.numel(), dtype=torch.float64).view(t.shape)

    def rows() -> tuple[torch.Tensor, torch.Tensor]:
        flat = t.reshape(-1, columns)
        return flat, run.targets(flat, 1)

    def masked() -> torch.Tensor:
        return (F.cross_entropy(*rows(), reduction="none") * torch.linspace(0, 1, t.numel() // columns)).sum()

    options: list[Callable[[], torch.Tensor]] = [
        lambda: F.cross_entropy(*rows()),
        lambda: F.cross_entropy(*rows()),
        lambda: F.cross_entropy(*rows(), reduction="sum"),
        lambda: F.cross_entropy(*rows(), weight=weight),
        lambda: F.cross_entropy(*rows(), weight=weight, label_smoothing=0.1),
        lambda: F.cross_entropy(*rows(), label_smoothing=0.1, ignore_index=0),
        lambda: torch.nn.CrossEntropyLoss(reduction="sum")(*rows()),
        lambda: F.cross_entropy(t.reshape(-1, columns), beside.view(-1, columns).softmax(-1)),
        lambda: F.cross_entropy(t.movedim(-1, 1), run.targets(t, t.dim() - 1)) if t.dim() > 2 else t.sum(),
        lambda: F.cross_entropy(input=rows()[0], target=rows()[1]),
        masked,
        lambda: F.nll_loss(t.log_softmax(-1).reshape(-1, columns), rows()[1], weight=weight),
        lambda: F.mse_loss(t, beside),
        lambda: F.l1_loss(t, beside, reduction="sum"),
        lambda: F.smooth_l1_loss(t, beside, beta=0.3),
        lambda: F.huber_loss(t, beside, delta=0.3),
        lambda: F.binary_cross_entropy_with_logits(t, beside),
        lambda: F.kl_div(t.log_softmax(-1), beside, reduction="batchmean"),
        lambda: t.sum(),
        lambda: t.mean(),
        lambda: t.logsumexp(-1).square().mean(),
        lambda: t.log_softmax(-1).gather(-1, run.targets(t, t.dim() - 1).clamp(min=0).unsqueeze(-1)).mean(),
        lambda: t.amax(-1).sum(),
        lambda: t.var(),
        lambda: (t * t).mean(),
        lambda: F.cross_entropy(*rows(), weight=run.embedding.sum(1).exp()),
    ]
    run.losses.append(run.draw.choice(options)() * run.draw.choice([1.0, 1.0, 0.3, 1024.0]))


def _retaining(t: torch.Tensor) -> torch.Tensor:
    t.retain_grad()
    return t


def hook(run: Run) -> None:
    t = run.any()
    if t.requires_grad and not run.wrote:  # torch itself fails with hooks on what is written into
        options: list[Callable[[], Any]] = [
            lambda: t.register_hook(lambda grad: run.see(grad)),
            lambda: t.register_hook(lambda grad: 2 * grad),
            lambda: run.pool.append(_retaining(t)),
        ]
        run.draw.choice(options)()
        run.hooked = True


def differentiate(run: Run) -> None:
    t = run.any()
    losses = [loss for loss in run.losses if loss.requires_grad]
    if not losses or not t.requires_grad:
        return
    if run.draw.random() < 0.6:
        if run.wrote:  # which of two views that share what was written has the gradient is not defined
            return
        (grad,) = torch.autograd.grad(losses[-1], t, retain_graph=True, allow_unused=True)
        run.see(torch.zeros(tuple(t.shape)) if grad is None else grad)
        return
    if run.hooked:  # where a hook sits on what second derivatives read depends on what an operation saves
        return
    grads = torch.autograd.grad(losses[-1], run.leaves(), create_graph=True, allow_unused=True)
    found = [g.square().sum() for g in grads if g is not None]
    if found and run.draw.random() < 0.7:
        run.losses.append(torch.stack(found).sum())


_STEPS = [rearrange, rearrange, rearrange, compute, look, write, lose, lose, hook, differentiate]


def play(seed: int, make: Make, *, writes: bool) -> tuple[Run, str]:
    """A run, and how it ended: empty, or with which exception."""
    run = Run(seed, make)
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(run.draw.randint(2, 9)):
                step = run.draw.choice(_STEPS)
                if step is not write or writes:
                    step(run)
            lose(run)
            total = torch.stack([loss for loss in run.losses if loss.requires_grad] or [run.x.sum() * 0]).sum()
            if not total.requires_grad:
                return run, ""
            again = run.draw.random() < 0.2
            total.backward(retain_graph=again)
            if again:
                total.backward()
            for t in run.pool:
                if t.retains_grad and t.grad is not None:
                    run.see(t.grad)
            if run.draw.random() < 0.6:
                torch.optim.SGD(run.leaves(), lr=0.1).step()
            look(run)
            look(run)
            run.see(run.pool[0])
        except OutcoreError as refused:
            error = "" if "comes too late" in str(refused) else str(refused)
            run.refused = True
        except (RuntimeError, ValueError, IndexError, TypeError) as caught:
            error = f"{type(caught).__name__}: {caught}"
    return run, error
