"""One plan after another on the same model, with dropout everywhere: every one gives the gradients of plain training.

As benchmarks do it: the recording is shared, steps with other random numbers run in between, and nothing that one plan
has left behind may change what the next one computes.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.program.policies import KEEP, RECOMPUTE


class Block(nn.Module):
    """Attention and two layers, each with dropout and a norm behind a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (self.query(x) @ self.key(x).transpose(1, 2) / x.shape[-1] ** 0.5).softmax(-1)
        x = self.first(x + self.dropout(self.out(F.dropout(scores, 0.1, self.training) @ self.value(x))))
        return self.second(x + self.dropout(self.narrow(F.gelu(self.wide(x)))))


class Language(nn.Module):
    """A small encoder that makes its loss itself."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.dropout = nn.Embedding(40, width), nn.Dropout(0.1)
        self.blocks = nn.Sequential(Block(width), Block(width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.dropout(self.words(ids)))
        return F.cross_entropy((x @ self.words.weight.T).flatten(0, 1), ids.flatten())


class Decoder(nn.Module):
    """Attention over what is given, at every step of a recurrence: Echo's own case."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.query, self.score = nn.Embedding(40, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.cell, self.out, self.dropout = nn.LSTMCell(2 * width, width), nn.Linear(width, 40), nn.Dropout(0.2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        keys = self.words(ids)
        state, memory, states = torch.zeros_like(keys[:, 0]), torch.zeros_like(keys[:, 0]), []
        for t in range(ids.shape[1]):
            scores = self.score(torch.tanh(self.query(state).unsqueeze(1) + keys)).squeeze(-1)
            context = torch.bmm(scores.softmax(-1).unsqueeze(1), keys).squeeze(1)
            state, memory = self.cell(torch.cat([keys[:, t], self.dropout(context)], 1), (state, memory))
            states.append(state)
        return F.cross_entropy(self.out(torch.stack(states, 1)).flatten(0, 1), ids.flatten())


def gradients(model: nn.Module, ids: torch.Tensor, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(ids).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", [Language, Decoder])
def test_every_plan_of_a_sequence_gives_the_gradients_of_plain_training(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, ids = make(), torch.randint(0, 40, (3, 7))
    weights = [p.detach().clone() for p in model.parameters()]
    want = gradients(model, ids, 5)
    costs = by_bytes(account(outcore.capture(model, (ids,))), 1e9)
    outcore.within(model, (ids,), memory=None, costs=costs, quiet=True)
    keeping = outcore.memory_plan(model).keeping
    choices = {name: keeping.choices(buffer) for name, buffer in keeping.buffers.items()}
    chosen = random.Random(0)
    plans = [
        {name: RECOMPUTE for name, options in choices.items() if RECOMPUTE in options},
        {name: options[-1] for name, options in choices.items() if options},
        *({name: chosen.choice([KEEP, *options]) for name, options in choices.items() if options} for _ in range(3)),
    ]
    assert len(plans[0]) > 10
    for plan in plans:
        outcore.within(model, (ids,), memory=None, costs=costs, plan=plan, quiet=True)
        for seed in (5, 6, 7, 5):
            got = gradients(model, ids, seed)
            if seed == 5:
                assert all(torch.equal(mine, plain) for mine, plain in zip(got, want, strict=True))
    outcore.release(model)
    assert all(torch.equal(mine, plain) for mine, plain in zip(gradients(model, ids, 5), want, strict=True))
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))
