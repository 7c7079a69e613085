"""What a loop changes between steps: attributes, flags, modules, hooks, weights, globals."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from .run import Run, images, program, rows, variants

TEMPERATURE = 1.0


class Net(nn.Module):
    """A small network with something of everything."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.2)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(width, 4)
        self.alpha = 1.0
        self.branch = 0
        self.steps = 0
        self.options = types.SimpleNamespace(scale=1.0)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.pool(x)
        return F.silu(self.bn2(self.conv2(x))) + x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.features(x) * self.alpha
        x = x.tanh() if self.branch % 2 else torch.sigmoid(x)
        x = self.drop(x) / (TEMPERATURE * self.options.scale)
        return self.head(x.mean((2, 3)))


@variants(
    alpha=lambda m, i: setattr(m, "alpha", 1.0 + i),
    branch=lambda m, i: setattr(m, "branch", i),
    dropout=lambda m, i: setattr(m.drop, "p", 0.1 * i),
    momentum=lambda m, i: setattr(m.bn1, "momentum", 0.1 * (i + 1)),
    eps=lambda m, i: setattr(m.bn2, "eps", 1e-5 * 10**i),
    namespace=lambda m, i: setattr(m.options, "scale", 1.0 + i),
    eval_norms=lambda m, i: (m.bn1.eval(), m.bn2.train(i % 2 == 0)),
    eval_all=lambda m, i: m.train(i % 2 == 0),
    inplace=lambda m, i: setattr(m.relu, "inplace", i % 2 == 0),
    pool=lambda m, i: setattr(m.pool, "kernel_size", 2 + i % 2),
    pool_stride=lambda m, i: setattr(m.pool, "stride", 1 + i % 2),
    freeze=lambda m, i: m.conv1.requires_grad_(i % 2 == 0),
    unfreeze=lambda m, i: m.conv2.requires_grad_(i > 0),
    freeze_norms=lambda m, i: m.bn1.requires_grad_(i == 1),
    channels_last=lambda m, i: m.to(memory_format=torch.channels_last) if i == 1 else None,
    swap_relu=lambda m, i: setattr(m, "relu", (nn.ReLU(), nn.GELU(), nn.LeakyReLU(0.1))[i % 3]),
    swap_pool=lambda m, i: setattr(m, "pool", (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Identity())[i % 3]),
    swap_norm=lambda m, i: setattr(m, "bn1", (m.bn1, nn.GroupNorm(2, 6), nn.InstanceNorm2d(6))[i % 3]),
    weights=lambda m, i: m.conv1.weight.data.mul_(1.5),
    new_data=lambda m, i: setattr(m.conv2.weight, "data", m.conv2.weight.data * 0.5),
    running=lambda m, i: m.bn1.running_mean.fill_(0.1 * i),
    new_buffer=lambda m, i: m.bn1.register_buffer("running_var", torch.full((6,), 1.0 + i)),
    own_forward=lambda m, i: setattr(m.relu, "forward", torch.tanh) if i == 1 else m.relu.__dict__.pop("forward", None),
    hook=lambda m, i: m.bn1.register_forward_hook(lambda _, __, out: out * 1.1),
    pre_hook=lambda m, i: m.conv2.register_forward_pre_hook(lambda _, given: (given[0] + 0.1,)),
    inplace_hook=lambda m, i: m.conv1.register_forward_hook(lambda _, __, out: out.mul_(0.9)),
    container_hook=lambda m, i: m.register_forward_hook(lambda _, __, out: out + i),
    backward_hook=lambda m, i: m.conv2.register_full_backward_hook(lambda _, g, __: (g[0] * 0.5,)),
    spectral=lambda m, i: spectral_norm(m.conv2) if i == 1 else None,
    weight_norm=lambda m, i: weight_norm(m.conv1) if i == 1 else None,
    parametrized=lambda m, i: parametrizations.weight_norm(m.conv1) if i == 1 else None,
    orthogonal=lambda m, i: parametrizations.orthogonal(m.head) if i == 1 else None,
    symmetric=lambda m, i: parametrize.register_parametrization(m.conv2, "weight", Halved()) if i == 1 else None,
    pruned=lambda m, i: prune.l1_unstructured(m.conv2, "weight", 0.3) if i == 1 else None,
    training_flag=lambda m, i: setattr(m.drop, "training", i % 2 == 0),
    norm_without_statistics=lambda m, i: setattr(m.bn1, "track_running_stats", i % 2 == 0),
)
def changes(run: Run, change: Any) -> None:
    model = run.manage(Net(), (images(0),))
    run.train(model, images, steps=4, before=lambda i: change(model, i) if i else None)
    run.note(model.steps, model.alpha)


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


@program
def a_global_constant(run: Run) -> None:
    global TEMPERATURE
    model = run.manage(Net(), (images(0),))

    def before(step: int) -> None:
        global TEMPERATURE
        TEMPERATURE = 1.0 + step

    try:
        run.train(model, images, before=before)
    finally:
        TEMPERATURE = 1.0


@program
def a_closure_and_a_default(run: Run) -> None:
    scale = [1.0]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, bias: list[float] = [0.5]) -> torch.Tensor:  # noqa: B006
            bias[0] += 0.25
            return torch.tanh(self.layer(x) * scale[0] + bias[0])

    model = run.manage(Scaled(), (rows(0),))
    Scaled.forward.__defaults__[0][0] = 0.5
    run.train(model, rows, before=lambda i: scale.__setitem__(0, 1.0 + i))


class Slots:
    """An object without a dictionary."""

    __slots__ = ("scale", "x")

    def __init__(self, x: torch.Tensor, scale: float) -> None:
        self.x, self.scale = x, scale


@program
def a_batch_with_slots(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh())

        def forward(self, batch: Slots) -> torch.Tensor:
            return self.layers(batch.x) * batch.scale

    model = run.manage(Model(), (Slots(rows(0), 1.0),))
    run.train(model, lambda i: Slots(rows(i), 1.0 + i))


@program
def a_schedule_kept_in_slots(run: Run) -> None:
    schedule = Slots(rows(0), 1.0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.schedule = schedule

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softplus(self.layer(x)) * self.schedule.scale

    model = run.manage(Model(), (rows(0),))
    run.train(model, rows, before=lambda i: setattr(schedule, "scale", 2.0**i))


@variants(floats=lambda i: 0.5 + i, flags=lambda i: i % 2 == 0, strings=lambda i: ("tanh", "relu", "gelu")[i % 3])
def an_argument_that_changes(run: Run, argument: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, how: Any) -> torch.Tensor:
            x = self.first(x)
            if isinstance(how, str):
                x = getattr(torch.nn.functional, how)(x)
            elif isinstance(how, bool):
                x = x.relu() if how else x.tanh()
            else:
                x = torch.sigmoid(x * how)
            return self.second(x)

    model = run.manage(Model(), (rows(0), argument(0)))
    run.train(model, lambda i: (rows(i), argument(i)), steps=5)


@program
def more_layers_with_time(run: Run) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
            self.depth = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[: self.depth]:
                x = torch.tanh(layer(x)) + x
            return x

    model = run.manage(Growing(), (rows(0),))
    run.train(model, rows, steps=4, before=lambda i: setattr(model, "depth", 1 + i))


@program
def layers_added_and_removed(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = run.manage(model, (rows(0),))

    def before(step: int) -> None:
        if step == 1:
            model.append(nn.Tanh())
            model.insert(1, nn.LayerNorm(8))
        if step == 2:
            del model[2]

    run.train(model, rows, steps=4, before=before)


@program
def an_embedding_that_grows(run: Run) -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    model = run.manage(model, (torch.arange(6).view(2, 3),))

    def before(step: int) -> None:
        if step == 2:
            bigger = nn.Embedding(14, 8)
            bigger.weight.data[:10] = model[0].weight.data
            model[0] = bigger

    for step in range(4):
        before(step)
        model.zero_grad()
        loss = model(torch.arange(6).view(2, 3) + (4 if step > 2 else 0)).square().sum()
        loss.backward()
        run.note(loss)
        run.note_model(model)


@program
def gradient_reversal(run: Run) -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
            ctx.strength = strength
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return -ctx.strength * gradient, None

    class Adversarial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
            self.label, self.domain, self.strength = nn.Linear(8, 3), nn.Linear(8, 2), 0.0

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.features(x)
            return self.label(x), self.domain(Reverse.apply(x, self.strength))

    model = run.manage(Adversarial(), (rows(0),))
    run.train(model, rows, before=lambda i: setattr(model, "strength", 0.5 * i))
