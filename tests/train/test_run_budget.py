"""A whole run within a budget: met by what it takes, counted as planned, or refused with one that is enough."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outcore.data import write_slides
from outcore.errors import TrainError

from .running import SLIDES, run, same, slide_job, table, weights

WIDE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.layer(x).mean((2, 3))

def model():
    return Net()

def batch(size):
    images = torch.randn(size, 3, 64, 64)
    return INPUTS, torch.randint(2, (size,))
"""


@pytest.mark.parametrize("inputs", ["images", "(images,)", '{"x": images}'])
def test_micro_batches_that_wait_are_not_in_the_memory_of_a_step(inputs: str, tmp_path: Path) -> None:
    """On a CPU they would be, were all of a step's counted: a GPU holds only the one at work."""
    job, held = tmp_path / "job.py", {}
    job.write_text(WIDE.replace("INPUTS", inputs))
    for count in (1, 6):
        out = tmp_path / str(count)
        assert run(job, out, "train.steps=2", f"train.accumulate={count}", "train.batch=2")[0] == 0
        held[count] = json.loads((out / "run.json").read_text())["measured"]["peak_bytes"]
    images, weights_bytes = 2 * 3 * 64 * 64 * 4, 8 * 4
    assert images < held[1] <= held[6] <= held[1] + 4 * weights_bytes < 3 * images


@pytest.mark.parametrize(("memory", "how"), [("4MiB", "budget"), ("600KiB", "streamed")])
def test_a_budget_is_met_by_what_it_takes(tmp_path: Path, memory: str, how: str) -> None:
    (tmp_path / "job.py").write_text(SLIDES)
    data = write_slides(tmp_path / "data", 2, size=(192, 256), tile=32)
    run(tmp_path / "job.py", tmp_path / "plain", f"data.train={data}")
    _, said = run(tmp_path / "job.py", tmp_path / "run", f"data.train={data}", f"plan.memory={memory}")
    assert f"\n{how} " in said
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["measured"]["peak_bytes"] <= facts["budget_bytes"]
    assert facts["measured"]["peak_bytes"] == pytest.approx(facts["forecast"]["planned_peak_bytes"], rel=0.1)
    for one, two in zip(*(table(tmp_path / n / "steps.csv") for n in ("plain", "run")), strict=True):
        assert float(one["loss"]) == pytest.approx(float(two["loss"]), abs=1e-5)


PIXELS = """
import torch
from torch import nn

def model():
    layers = [m for _ in range(4) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Conv2d(8, 16, 1))

def batch(size):
    return torch.rand(size, 3, 64, 64), torch.randint(16, (size, 64, 64))

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def test_what_a_loss_over_every_pixel_holds_is_in_the_budget(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(PIXELS)
    for memory, how in (("1800KiB", "enough for a plain step"), ("1600KiB", "within"), ("1450KiB", "within")):
        _, said = run(tmp_path / "job.py", tmp_path / memory, "train.steps=2", f"plan.memory={memory}")
        assert how in said
        facts = json.loads((tmp_path / memory / "run.json").read_text())
        assert facts["measured"]["peak_bytes"] <= facts["budget_bytes"]


NORMS = """
import torch
from torch import nn

size = 4

def model():
    blocks = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *(m for b in blocks for m in b), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def batch(size):
    return torch.randn(size, 3, 32, 32), torch.randint(8, (size,))

def dataset(split):
    random = torch.Generator().manual_seed(len(split))
    return [(torch.randn(3, 32, 32, generator=random), k % 8) for k in range(12 if split == "train" else 4)]
"""


def test_after_few_steps_within_a_budget_batch_norm_validates_as_it_does_without_one(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(NORMS)
    run(tmp_path / "job.py", tmp_path / "plain", "train.batch=4")
    _, said = run(tmp_path / "job.py", tmp_path / "run", "train.batch=4", "plan.memory=1600KiB")
    assert "\nwithin " in said
    one, two = (table(tmp_path / n / "epochs.csv")[-1] for n in ("plain", "run"))
    assert one["validation_loss"] == two["validation_loss"]
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "run"))


def test_a_budget_that_nothing_can_meet_is_refused_with_the_least_that_would_do(tmp_path: Path) -> None:
    job, data = slide_job(tmp_path)
    said = r"a plain step needs .*, the budget is 9\.8 KiB; policies and tiles need at least .*; give --memory (\w+) or"
    with pytest.raises(TrainError, match=said) as refused:
        run(job, tmp_path / "run", f"data.train={data}", "plan.memory=10kB")
    found = re.search(said, str(refused.value))
    assert found is not None
    assert run(job, tmp_path / "again", f"data.train={data}", f"plan.memory={found[1]}")[0] == 0


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ("", r"policies and tiles need at least [\d.]+ KiB"),
        (
            "def loss(output, target):\n    return nn.functional.cross_entropy(output, target)\n",
            "and tiles need no less",
        ),
    ],
)
def test_where_policies_take_more_than_a_plain_step_the_budget_that_a_refusal_names_is_enough(
    tmp_path: Path, loss: str, why: str
) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import torch\nfrom torch import nn\n\n\ndef model():\n"
        "    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))\n\n\n"
        f"def batch(size):\n    return torch.randn(size, 6), torch.randint(3, (size,))\n\n\n{loss}"
    )
    with pytest.raises(TrainError, match=f"{why}; give --memory") as refused:
        run(job, tmp_path / "run", "train.steps=1", "plan.memory=1KiB")
    found = re.search(r"give --memory (\w+) or more$", str(refused.value))
    assert found is not None
    assert run(job, tmp_path / "again", "train.steps=1", f"plan.memory={found[1]}")[0] == 0
