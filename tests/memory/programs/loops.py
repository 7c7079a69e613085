"""Ways of training: several models, several passes, gradients of gradients."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

from .effects import block
from .run import Run, images, program, rows


def convolutions(width: int = 6) -> nn.Sequential:
    """A few layers on images."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 4),
    )


def deep() -> nn.Sequential:
    """Blocks on rows with activations between."""
    return nn.Sequential(block(), nn.ReLU(), block(), nn.Tanh(), block())


@program
def accumulated_gradients(run: Run) -> None:
    model = run.manage(convolutions(), (images(0),))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(3):
        for i in range(3):
            (model(images(3 * step + i)).square().mean() / 3).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        run.note_model(model)
        optimizer.step()
        optimizer.zero_grad()


@program
def two_forwards_one_backward(run: Run) -> None:
    model = run.manage(convolutions(), (images(0),))
    for step in range(3):
        model.zero_grad()
        a, b = model(images(step)), model(images(step + 10))
        loss = (a - b).square().mean() + a.abs().mean()
        loss.backward()
        run.note(loss)
        run.note_model(model)


@program
def backward_in_another_order(run: Run) -> None:
    model = run.manage(convolutions(), (images(0),))
    first, second = model(images(0)).square().mean(), model(images(1)).square().mean()
    first.backward()
    third = model(images(2)).square().mean()
    third.backward()
    second.backward()
    run.note(first, second, third)
    run.note_model(model)


@program
def the_graph_kept_for_two_backwards(run: Run) -> None:
    model = run.manage(convolutions(), (images(0),))
    for step in range(2):
        model.zero_grad()
        output = model(images(step))
        output[:, 0].sum().backward(retain_graph=True)
        run.note_model(model)
        output[:, 1:].sum().backward()
        run.note_model(model)


@program
def a_siamese_network_of_several_crops(run: Run) -> None:
    model = run.manage(convolutions(), (images(0, batch=4, side=16),))
    for step in range(3):
        model.zero_grad()
        crops = [images(step, side=16), images(step + 1, side=16), images(step, batch=4, side=8)]
        found = [F.normalize(model(c), dim=1) for c in crops]
        loss = 2 - (found[0] * found[1]).sum(1).mean() - found[2].mean()
        loss.backward()
        run.note(loss)
        run.note_model(model)


@program
def adversarial_training(run: Run) -> None:
    generator = run.manage(
        nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)), (rows(0, width=4),)
    )
    judge = run.manage(
        nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1)), (rows(0),)
    )
    optimizers = [torch.optim.Adam(m.parameters(), 0.01, betas=(0.5, 0.9)) for m in (generator, judge)]
    for step in range(3):
        fake = generator(rows(step, width=4))
        optimizers[1].zero_grad()
        loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(rows(step))).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        fooled = F.softplus(-judge(fake)).mean()
        fooled.backward()
        optimizers[0].step()
        run.note(loss, fooled)
        run.note_model(generator, judge)


@program
def a_gradient_penalty(run: Run) -> None:
    judge = run.manage(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1)),
        (rows(0).requires_grad_(),),
    )
    for step in range(3):
        judge.zero_grad()
        x = rows(step).requires_grad_()
        (gradient,) = torch.autograd.grad(judge(x).sum(), x, create_graph=True)
        loss = (gradient.norm(dim=1) - 1).square().mean() + judge(x).mean()
        loss.backward()
        run.note(loss, x.grad)
        run.note_model(judge)


@program
def a_gradient_of_the_input(run: Run) -> None:
    model = run.manage(convolutions(), (images(0).requires_grad_(),))
    for step in range(3):
        x = images(step).requires_grad_()
        loss = model(x).logsumexp(1).mean()
        (gradient,) = torch.autograd.grad(loss, x)
        loss = model((x + 0.1 * gradient.sign()).detach()).square().mean()
        model.zero_grad()
        loss.backward()
        run.note(gradient, loss)
        run.note_model(model)


@program
def learning_to_learn(run: Run) -> None:
    """MAML: a step of training inside the loss, with the model called on other weights."""
    model = run.manage(deep(), (rows(0),))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        weights = dict(model.named_parameters())
        inner = torch.func.functional_call(model, weights, (rows(step),)).square().mean()
        gradients = torch.autograd.grad(inner, tuple(weights.values()), create_graph=True)
        adapted = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
        loss = torch.func.functional_call(model, adapted, (rows(step + 5),)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        run.note(inner, loss)
        run.note_model(model)
        optimizer.step()


@program
def functional_gradients(run: Run) -> None:
    model = run.manage(deep(), (rows(0),))

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    weights = {n: p.detach() for n, p in model.named_parameters()}
    found, value = torch.func.grad_and_value(loss)(weights, rows(0))
    run.note(value, *found.values())
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.stack([rows(0), rows(1)]))
    run.note(*each.values())
    run.train(model, rows)


@program
def a_transform_inside_forward(run: Run) -> None:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = block(), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.out.weight.detach()
            force = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(row @ weight).sum()))(x.detach())
            return torch.relu(self.net(x)) + force

    model = run.manage(Energy(), (rows(0),))
    run.train(model, rows)


@program
def a_gradient_inside_forward(run: Run) -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return torch.cat([energy, force], 1)

    model = run.manage(Forces(), (rows(0),))
    run.train(model, rows)


@program
def a_teacher_of_averages(run: Run) -> None:
    student = run.manage(convolutions(), (images(0),))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    for step in range(3):
        with torch.no_grad():
            target = teacher(images(step + 7))
        loss = (student(images(step)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), student.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
        run.note(loss, target)
        run.note_model(student, teacher)


@program
def weights_averaged_over_steps(run: Run) -> None:
    model = run.manage(deep(), (rows(0),))
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    run.note_model(model, averaged)


@program
def a_closure_that_is_called_again(run: Run) -> None:
    model = run.manage(deep(), (rows(0),))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(rows(0)).square().mean()
        loss.backward()
        run.note(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)
    run.note_model(model)


@program
def updates_in_backward(run: Run) -> None:
    model = run.manage(deep(), (rows(0),))
    optimizers = {p: torch.optim.SGD([p], 0.05) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(3):
        loss = model(rows(step)).square().mean()
        loss.backward()
        run.note(loss)
    run.note_model(model)
