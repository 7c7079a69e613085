"""Programs that once differed from plain PyTorch, or were refused where it trains, cut down to a few lines each."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .effects import block
from .run import Run, program, rows, variants


class Centred(nn.Module):
    """Subtracts a running mean that it writes in place."""

    def __init__(self, how: str = "forward") -> None:
        super().__init__()
        self.how, self.a, self.b = how, block(), block()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        centred = torch.tanh(h - self.mean)
        if self.how == "forward":
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.b(torch.sigmoid(centred))


@program
def a_buffer_written_by_the_next_forward(run: Run) -> None:
    model = run.manage(Centred(), (rows(0),))
    for step in range(3):
        model.zero_grad()
        first, second = model(rows(step)), model(rows(step + 10))
        (first.square().mean() + second.abs().mean()).backward()
        run.note(first, second)
        run.note_model(model)


@program
def a_buffer_written_by_the_loop_before_backward(run: Run) -> None:
    model = run.manage(Centred("loop"), (rows(0),))
    for step in range(3):
        model.zero_grad()
        output = model(rows(step))
        with torch.no_grad():
            model.mean.lerp_(output.mean(0), 0.1)
        output.square().mean().backward()
        run.note(output)
        run.note_model(model)


class Statistics(nn.Module):
    """Reads statistics before and after what writes them without counting it as a write."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = block(), nn.BatchNorm1d(8), block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        before = torch.tanh(h - self.norm.running_mean)
        after = torch.sigmoid(self.norm(h) * self.norm.running_var + self.norm.running_mean)
        return self.b(before.relu() + after.sin())


@variants(once=False, twice=True)
def statistics_read_beside_their_norm(run: Run, twice: bool) -> None:
    model = run.manage(Statistics(), (rows(0),))
    for step in range(3):
        model.zero_grad()
        outputs = [model(rows(step + 10 * i)) for i in range(1 + twice)]
        torch.stack([o.square().mean() for o in outputs]).sum().backward()
        run.note(*outputs)
        run.note_model(model)


@program
def a_buffer_written_before_it_is_read(run: Run) -> None:
    class Net(Centred):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.1)
            return self.b(torch.sigmoid(torch.tanh(h - self.mean)))

    model = run.manage(Net(), (rows(0),))
    for step in range(3):
        model.zero_grad()
        first, second = model(rows(step)), model(rows(step + 10))
        (first.square().mean() + second.abs().mean()).backward()
        run.note(first, second)
        run.note_model(model)


class Overwrites(nn.Module):
    """Writes into a value that another was made from, in a way that need not be in the plan."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b, self.on = how, block(), block(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) * 2
        made = torch.tanh(torch.tanh(h))
        if self.on:
            match self.how:
                case "positional":
                    F.relu(h, True)
                case "dropout":
                    F.dropout(h, 0.5, True, True)
                case "threshold":
                    F.threshold_(h, 0.1, 0.2)
                case "foreach":
                    torch._foreach_mul_([h], 0.5)
                case "data":
                    h.data.mul_(0.5)
                case "view":
                    h.view(-1)[::2].zero_()
                case "function":
                    h = Doubled.apply(h)
                case "out":
                    with torch.no_grad():
                        torch.mul(h.detach(), 3.0, out=h.detach())
                case "index":
                    h[h > 0] = 0.3
                case "copy":
                    h.copy_(x)
                case "random":
                    h.detach().uniform_()
                case "sign":
                    h.t().add_(1)
        return self.b(made) + h


class Doubled(torch.autograd.Function):
    """Writes into what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


_WAYS = "positional dropout threshold foreach data view function out index copy random sign".split()


@variants(**{way: way for way in _WAYS})
def a_value_overwritten_later(run: Run, how: str) -> None:
    model = run.manage(Overwrites(how), (rows(0),))
    run.train(model, rows, before=lambda step: setattr(model, "on", step % 2 == 1))


@variants(**{way: way for way in _WAYS})
def a_value_overwritten_as_planned(run: Run, how: str) -> None:
    model = Overwrites(how)
    model.on = True
    run.train(run.manage(model, (rows(0),)), rows)


@program
def a_transform_inside(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = block(), block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.vmap(lambda row: row.sin() * 2)(self.a(x))
            return self.b(torch.relu(h)) + torch.func.grad(lambda v: v.square().sum())(h)

    run.train(run.manage(Net(), (rows(0),)), rows)


@program
def views_of_a_parameter_in_a_loop(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.scale = block(), nn.Parameter(torch.full((8,), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(self.a(x) * self.scale[None])
            return x

    run.train(run.manage(Net(), (rows(0),)), rows)


@program
def parameters_that_are_not_registered(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = block(), block()
            self.weights = [nn.Parameter(torch.eye(8)), nn.Parameter(torch.full((8,), 0.3))]
            self.layers = (nn.Linear(8, 8), nn.BatchNorm1d(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x)) @ self.weights[0] + self.weights[1]
            for layer in self.layers:
                h = torch.relu(layer(h))
            return self.b(torch.sigmoid(h * self.weights[1]))

    model = run.manage(Net(), (rows(0),))
    run.train(model, rows)
    run.note(*(w.grad for w in model.weights), model.layers[1].running_mean)
    run.note_model(*model.layers)


@variants(checkpoint=True, hook=False)
def a_function_that_knows_a_tensor_of_the_forward(run: Run, checkpointed: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = block(), block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x))
            if checkpointed:
                return checkpoint(lambda t: self.b(t * h) + h, torch.relu(h), use_reentrant=False)
            handle = self.b.register_forward_hook(lambda _, __, output: output * h)
            try:
                return self.b(torch.relu(h))
            finally:
                handle.remove()

    run.train(run.manage(Net(), (rows(0),)), rows)


@variants(no_grad=True, frozen=False)
def an_encoder_that_is_not_differentiated(run: Run, no_grad: bool) -> None:
    """Torch computes it in another way, in which nobody may seem to look at functions."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder, self.attention = (
                nn.TransformerEncoder(layer, 2),
                nn.MultiheadAttention(8, 2, batch_first=True),
            )
            self.a, self.b = block(), block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(not no_grad):
                h = self.encoder(x)
                h = h + self.attention(h, h, h)[0]
            return self.b(torch.relu(self.a(h) + x))

    model = run.manage(Net(), (torch.randn(3, 4, 8),))
    model.encoder.eval().requires_grad_(no_grad)
    model.attention.eval().requires_grad_(no_grad)
    run.train(model, lambda _: torch.randn(3, 4, 8))


@program
def a_layer_whose_forward_was_replaced(run: Run) -> None:
    """What it writes in a trial is the original's."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), block())
    inner = model[1].forward
    model[1].forward = lambda x: inner(x) * 1.2
    run.train(run.manage(model, (rows(0),)), rows)


@program
def state_inside_objects(run: Run) -> None:
    """Recording a model runs its forward, which writes where no attribute of a module is."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = block(), block()
            self.options = types.SimpleNamespace(calls=0, seen=[])
            self.tables: dict[str, Any] = {"sums": [], "bank": {"queue": torch.zeros(8)}}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.options.calls += 1
            h = torch.tanh(self.a(x)) * self.options.calls
            self.options.seen.append(self.options.calls)
            self.tables["sums"].append(h.detach().sum())
            h = h - self.tables["bank"]["queue"]
            with torch.no_grad():
                self.tables["bank"]["queue"].lerp_(h.mean(0), 0.5)
            return self.b(h)

    model = run.manage(Net(), (rows(0),))
    run.train(model, rows)
    run.note(model.options.calls, model.options.seen, *model.tables["sums"], model.tables["bank"]["queue"])


@program
def a_copy_that_has_changed_since(run: Run) -> None:
    """The policies of the model are those of its copy as far as they fit."""
    model = run.manage(nn.Sequential(block(), nn.ReLU(), block(), nn.Tanh(), block()), (rows(0),))
    run.train(model, rows, steps=1)
    model[0][0].register_forward_hook(lambda _, __, output: output * 1.1)
    model[1] = nn.Sigmoid()
    model[3] = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    run.train(copy.deepcopy(model), rows, steps=2)
