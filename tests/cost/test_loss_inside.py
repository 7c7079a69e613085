"""A model that makes its own loss: backward starts there, and only there."""

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.step_memory import memory_curve


class WithLoss(nn.Module):
    """Returns its loss and what it was made from, as Hugging Face's models do."""

    def __init__(self, use: bool) -> None:
        super().__init__()
        self.body, self.head, self.use = nn.Linear(8, 64), nn.Linear(64, 400), use

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        loss = F.cross_entropy(logits, labels) if self.use else hidden.square().mean()
        return loss, logits


def peaks(use: bool) -> tuple[int, int]:
    """Predicted and counted."""
    torch.manual_seed(0)
    model, args = WithLoss(use), (torch.randn(256, 8), torch.randint(0, 400, (256,)))
    graph = outcore.capture(model, args)
    predicted = memory_curve(graph, account(graph), optimizer=0.0)
    given = predicted.moments[0].bytes
    with LiveBytes([*model.parameters(), *args]) as live:
        loss, logits = model(*args)
        total = loss if use else loss + F.cross_entropy(logits, args[1])
        total.backward()
        return predicted.peak_bytes - given.weights - given.inputs, live.peak


def test_what_the_loss_was_made_from_gets_no_gradient_of_its_own() -> None:
    predicted, counted = peaks(use=True)
    assert abs(predicted / counted - 1) < 0.02, (predicted, counted)


def test_an_output_beside_a_loss_that_is_not_made_from_it_gets_one() -> None:
    predicted, counted = peaks(use=False)
    logits = 256 * 400 * 4
    assert predicted > 2 * logits  # it and its gradient; the loss that is made outside takes more
    assert counted > predicted
