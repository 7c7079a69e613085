"""What a forward writes, keeps and decides: attributes, lists, state between calls, branches on data, randomness."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .run import Run, images, program, rows, variants


def block(width: int = 8) -> nn.Sequential:
    """A few layers on rows."""
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width))


class Written(nn.Module):
    """Writes to itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = block(), block()
        self.kept: Any = None
        self.items: list[Any] = []
        self.table: dict[str, Any] = {}
        self.register_buffer("ema", torch.zeros(8))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.relu(self.first(x))
        match self.how:
            case "attribute":
                self.kept = hidden.abs().mean()
            case "list":
                self.items.append(hidden.detach())
            case "dict":
                self.table[f"step {self.calls}"] = hidden.mean().item()
            case "item":
                self.kept = hidden.max().item()
            case "buffer":
                self.ema = 0.9 * self.ema + 0.1 * hidden.detach().mean(0)
            case "inplace_buffer":
                with torch.no_grad():
                    self.ema.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            case "grad_attribute":
                self.kept = hidden
                hidden.retain_grad()
            case "tensor_hook":
                hidden.register_hook(lambda g: self.items.append(g.detach().clone()))
            case "gradient_scaled":
                hidden.register_hook(lambda g: g * 0.5)
            case "numpy":
                self.items.append(hidden.detach().numpy().copy().tolist())
            case "print":
                print(float(hidden.sum()), end="")
            case "set_parameter_data":
                self.second[3].bias.data = self.second[3].bias.data + 0.01
            case "cache":
                if self.kept is None:
                    self.kept = torch.linspace(0, 1, 8)
                hidden = hidden + self.kept
            case "nonlocal":
                random_state.append(self.calls)
        return self.second(hidden) + hidden


random_state: list[int] = []


@variants(
    **{
        name: name
        for name in (
            "attribute",
            "list",
            "dict",
            "item",
            "buffer",
            "inplace_buffer",
            "grad_attribute",
            "tensor_hook",
            "gradient_scaled",
            "numpy",
            "print",
            "set_parameter_data",
            "cache",
            "nonlocal",
        )
    }
)
def writes(run: Run, how: str) -> None:
    model = run.manage(Written(how), (rows(0),))
    random_state.clear()

    def loss(output: torch.Tensor) -> torch.Tensor:
        value = output.square().mean()
        if how == "attribute":
            value = value + 0.1 * model.kept
        return value

    run.train(model, rows, loss=loss)
    run.note(model.calls, model.table, *model.items, random_state[:])
    if how == "grad_attribute":
        run.note(model.kept.grad)
    if how in ("item", "attribute"):
        run.note(model.kept)


@variants(detached=True, whole=False)
def state_from_call_to_call(run: Run, detached: bool) -> None:
    """Truncated back-propagation: several calls before one backward, the state carried along."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(8, 8), nn.Linear(8, 4)
            self.h: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.h if self.h is not None else x.new_zeros(len(x), 8)
            self.h = torch.tanh(self.cell(x, h))
            return self.out(self.h)

    model = run.manage(Recurrent(), (rows(0),))
    model.h = None
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(3):
        if model.h is not None and (detached or step):
            model.h = model.h.detach()
        loss = torch.stack([model(rows(4 * step + i)).square().mean() for i in range(3)]).sum()
        optimizer.zero_grad()
        loss.backward()
        run.note(loss, model.h)
        run.note_model(model)
        optimizer.step()


class Decides(nn.Module):
    """Looks at numbers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b, self.gate = how, block(), block(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(x))
        match self.how:
            case "branch":
                return self.b(h) if h.sum() > x.sum() * 10 + 2 else torch.tanh(h) * 2
            case "mask":
                return self.b(h[h[:, 0] > 0.1]).sum(0)
            case "nonzero":
                index = (x[:, 0] > 0).nonzero()[:, 0]
                return self.b(h[index]) * len(index)
            case "loop":
                for _ in range(1 + int(x.abs().sum()) % 3):
                    h = torch.tanh(self.b(h)) + h
                return h
            case "item_scale":
                return self.b(h) * h.max().item()
            case "float":
                return self.b(h / float(x.std()))
            case "experts":
                choice = self.gate(h).argmax(1)
                out = torch.zeros_like(h)
                for i, expert in enumerate((self.a, self.b, torch.tanh)):
                    rows_ = (choice == i).nonzero()[:, 0]
                    if len(rows_):
                        out = out.index_add(0, rows_, expert(h[rows_]))
                return out
            case "python_random":
                return self.b(h) * random.random() if random.random() < 0.5 else torch.sigmoid(self.b(h))
            case "numpy_random":
                return self.b(h * float(np.random.rand()))
            case "drop_path":
                return h + (self.b(h) if random.random() < 0.6 else 0)
            case "permuted":
                return self.b(h[torch.randperm(len(h))])
            case "own_generator":
                return self.b(h + torch.randn(h.shape, generator=torch.Generator().manual_seed(int(x.abs().sum()))))
            case "tolist":
                sizes = (x[:, 0] > 0).long().tolist()
                return torch.cat([h[i : i + 1] * (1 + s) for i, s in enumerate(sizes)])
            case "unique":
                values, inverse = torch.unique((x[:, 0] * 2).long(), return_inverse=True)
                return self.b(h) * inverse[:, None] + len(values)
            case "try":
                try:
                    if x.sum() > 0:
                        raise ValueError("on purpose")
                    return self.b(h)
                except ValueError:
                    return torch.tanh(h) * 3
            case "topk":
                return self.b(h.topk(3, 0).values)
            case _:
                raise AssertionError(self.how)


@variants(
    **{
        name: name
        for name in (
            "branch",
            "mask",
            "nonzero",
            "loop",
            "item_scale",
            "float",
            "experts",
            "python_random",
            "numpy_random",
            "drop_path",
            "permuted",
            "own_generator",
            "tolist",
            "unique",
            "try",
            "topk",
        )
    }
)
def decides(run: Run, how: str) -> None:
    model = run.manage(Decides(how), (rows(0),))
    run.train(model, rows, steps=5)


@program
def packed_sequences(run: Run) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.out = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)

        def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
            found, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.out(F.relu(found))

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(2, 7, (4,), generator=generator)
        return torch.randint(20, (4, int(lengths.max())), generator=generator), lengths

    model = run.manage(Tagger(), batch(0))
    run.train(model, batch, steps=4)


@program
def several_lengths(run: Run) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), 2)
    model = run.manage(model, (torch.randn(2, 6, 8),))
    run.train(model, lambda i: torch.randn(2, (6, 4, 9, 1, 6)[i], 8), steps=5)


@program
def several_sizes_and_batches(run: Run) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(6, 4, 1)
    )
    model = run.manage(net, (images(0),))
    run.train(model, lambda i: images(i, batch=(2, 1, 5, 3)[i], side=(12, 9, 14, 12)[i]), steps=4)


@program
def a_graph_network(run: Run) -> None:
    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = block(), block()

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                sent = torch.relu(self.message(x.gather(0, edges[0][:, None].expand(-1, x.shape[1]))))
                got = torch.zeros_like(x).scatter_add(0, edges[1][:, None].expand_as(sent), sent)
                x = torch.tanh(self.update(got)) + x
            return x

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        edges = torch.randint(6, (2, 9 + step), generator=torch.Generator().manual_seed(step))
        return rows(step), edges

    model = run.manage(Messages(), batch(0))
    run.train(model, batch, steps=4)


@program
def different_outputs(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([block() for _ in range(3)])
            self.all_hidden = False

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
            hidden = []
            for layer in self.layers:
                x = torch.tanh(layer(x))
                hidden.append(x)
            found: dict[str, Any] = {"logits": x}
            if self.all_hidden:
                found["hidden"] = tuple(hidden)
            if labels is not None:
                found["loss"] = F.mse_loss(x, labels)
            return found

    model = run.manage(Model(), (rows(0),))
    for step in range(4):
        model.all_hidden = step in (1, 3)
        model.zero_grad()
        output = model(rows(step), rows(9) if step > 1 else None)
        run.note(sorted(output), len(output.get("hidden", ())))
        loss = (
            output["logits"].square().mean() + sum(h.mean() for h in output.get("hidden", ())) + output.get("loss", 0)
        )
        loss.backward()
        run.note_model(model)


@program
def parts_called_in_another_order(run: Run) -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([block() for _ in range(3)])
            self.order = [0, 1, 2]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in self.order:
                x = F.relu(self.parts[i](x)) + x
            return x

    model = run.manage(Shuffled(), (rows(0),))
    orders = [[0, 1, 2], [2, 0, 1], [1, 1, 0, 2], [0]]
    run.train(model, rows, steps=4, before=lambda i: setattr(model, "order", orders[i]))


@program
def in_place_on_what_others_are_made_from(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.disturb = nn.Linear(8, 8), nn.Linear(8, 8), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            y = torch.sigmoid(h)
            z = y * 2 + torch.tanh(h)
            if self.disturb:
                h.add_(1.0)
                h[0] = 3.0
            return self.b(z) * h

    model = run.manage(Model(), (rows(0),))
    run.train(model, rows, steps=4, before=lambda i: setattr(model, "disturb", i in (1, 2)))


@program
def in_place_hidden_in_a_branch(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.out, self.kind = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.bn(self.conv(x))
            y = h.exp()
            match self.kind:
                case 1:
                    h.clamp_(min=0)
                case 2:
                    h.mul_(0.5)
                case 3:
                    h *= 2
                case 4:
                    with torch.no_grad():
                        torch.add(h, 1, out=h)
                case 5:
                    h.masked_fill_(h > 1, 0.0)
            return self.out(torch.sigmoid(h) + y)

    model = run.manage(Model(), (images(0),))
    run.train(model, images, steps=6, before=lambda i: setattr(model, "kind", i))


@variants(value=ValueError, interrupt=KeyboardInterrupt)
def exceptions_in_the_middle(run: Run, error: type[BaseException]) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.at = nn.ModuleList([block() for _ in range(3)]), -1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                x = torch.relu(layer(x)) + x
                if i == self.at:
                    raise error("on purpose")
            return x

    model = run.manage(Fails(), (rows(0),))
    for step in range(6):
        model.at = step - 2 if step % 2 else -1
        model.zero_grad()
        try:
            loss = model(rows(step)).square().mean()
            loss.backward()
            run.note(loss)
        except error as raised:
            run.note(str(raised))
        run.note_model(model)
