"""What Echo was made for: a translation model with attention over an LSTM, written as a user would, and BERT-base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Bahdanau's: a small network scores every source position against the decoder's state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.score = nn.Linear(hidden, hidden), nn.Linear(hidden, 1, bias=False)

    def forward(self, state: torch.Tensor, keys: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        # Batch x source x hidden at every one of the target positions: what makes the memory grow with T squared.
        scores = self.score(torch.tanh(self.query(state).unsqueeze(1) + keys)).squeeze(-1)
        return torch.bmm(scores.softmax(-1).unsqueeze(1), encoded).squeeze(1)


class Translator(nn.Module):
    """An LSTM encoder, and an LSTM decoder that attends to it at every step."""

    def __init__(self, words: int = 8000, hidden: int = 512) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, hidden), nn.Embedding(words, hidden)
        self.encoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.keys = nn.Linear(hidden, hidden)
        self.attention = Attention(hidden)
        self.cell = nn.LSTMCell(2 * hidden, hidden)
        self.out = nn.Linear(hidden, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        encoded, (state, memory) = self.encoder(self.source(source))
        keys, words = self.keys(encoded), self.target(target)
        state, memory = state[0], memory[0]
        states = []
        for t in range(target.shape[1]):
            context = self.attention(state, keys, encoded)
            state, memory = self.cell(torch.cat([words[:, t], context], 1), (state, memory))
            states.append(state)
        logits = self.out(torch.stack(states, 1))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Workload:
    """A model with a batch."""

    name: str
    batch: int
    length: int
    hidden: int = 0
    attention: str = ""

    def make(self, device: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model and the arguments of a call."""
        torch.manual_seed(0)
        if self.name.startswith("lstm"):
            words = 8000 if self.hidden >= 512 else 100
            model: nn.Module = Translator(words, self.hidden)
            shape = (self.batch, self.length)
            args = tuple(torch.randint(0, words, shape, device=device) for _ in range(2))
            return model.to(device), args, {}
        from transformers import BertConfig, BertForMaskedLM

        sizes = (
            {} if not self.hidden else {"hidden_size": self.hidden, "num_hidden_layers": 2, "num_attention_heads": 2}
        )
        config = BertConfig(attn_implementation=self.attention, **sizes)
        ids = torch.randint(5, 30000, (self.batch, self.length), device=device)
        mask = torch.ones_like(ids)
        mask[:, -self.length // 8 :] = 0
        return BertForMaskedLM(config).to(device).train(), (), {"input_ids": ids, "attention_mask": mask, "labels": ids}


def loss_of(output: Any) -> torch.Tensor:
    """What is trained: both models make their loss themselves."""
    return output.loss if hasattr(output, "loss") else output


WORKLOADS = (
    Workload("lstm attention", 1024, 64, 1024),
    Workload("bert-base", 32, 256, attention="sdpa"),
    Workload("bert-base eager attention", 32, 256, attention="eager"),
    Workload("lstm attention as in Echo", 128, 100, 512),
    Workload("lstm attention longer", 128, 200, 512),
    Workload("bert-base larger", 64, 256, attention="sdpa"),
)
TINY = (
    Workload("lstm attention", 4, 12, 64),
    Workload("bert-base", 2, 32, 32, attention="sdpa"),
    Workload("bert-base eager attention", 2, 32, 32, attention="eager"),
)
