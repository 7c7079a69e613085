"""Batches that are dictionaries, or of whole numbers, as language models take them: predicted, fitted into a budget and
trained as a plain loop trains them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outcore.job import Job
from tests.train.running import run, same, weights

JOB = """
import torch
from torch import nn

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)))
        self.head = nn.Linear(16, 2)

    def forward(self, ids, mask=None):
        x = self.layers(self.words(ids))
        return self.head((x if mask is None else x * mask[..., None]).mean(1))

def model():
    return Tokens()

def batch(size):
    ids = torch.randint(50, (size, 64))
    return INPUTS, torch.randint(2, (size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
INPUTS = {"a dictionary": '{"ids": ids, "mask": (ids > 3).float()}', "whole numbers": "ids", "a tuple": "(ids,)"}


@pytest.mark.parametrize("memory", [None, "70%"])
@pytest.mark.parametrize("kind", INPUTS)
def test_tokens_train_as_by_a_plain_loop(kind: str, memory: str | None, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB.replace("INPUTS", INPUTS[kind]))
    words = ("train.steps=3", "train.batch=4", *([f"plan.memory={memory}"] if memory else []))
    code, said = run(job, tmp_path / "run", *words)
    assert code == 0 and "nothing is predicted" not in said, said
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["forecast"]["peak_bytes"] == pytest.approx(facts["measured"]["peak_bytes"], rel=0.05) or memory
    if memory:
        assert "recomputed" in said and facts["measured"]["peak_bytes"] <= 0.7 * facts["forecast"]["peak_bytes"]
        run(job, tmp_path / "plain", *words[:2])
        assert same(weights(tmp_path / "run"), weights(tmp_path / "plain"))
    first = Job.load(str(job)).build().state_dict()
    assert not torch.equal(first["head.weight"], weights(tmp_path / "run")["head.weight"])
