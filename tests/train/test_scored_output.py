"""Networks that return several tensors are validated by the one that is named; what cannot be measured is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outcore.errors import ConfigError
from outcore.infer.network import load_network
from outcore.train.scored_output import check_asked, chosen, pick, unfit
from tests.train.running import run, table, write_job

TWO = """

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x):
        y = self.net(x)
        return {returned}


def model():
    return Two()


def loss(output, target):
    return F.cross_entropy(output["scores"] if isinstance(output, dict) else output[0], target)
"""


def job_of_two(folder: Path, returned: str) -> Path:
    job = write_job(folder)
    job.write_text(job.read_text() + TWO.format(returned=returned))
    return job


KEYED = '{"scores": y, "first": y[:, :1]}'
NUMBERED = "(y, y[:, :1])"


def test_metrics_of_a_named_output_are_those_of_the_network_that_returns_it_alone(tmp_path: Path) -> None:
    figures = {}
    for name, returned, words in (
        ("plain", '{"scores": y}', ()),
        ("keyed", KEYED, ("key=scores",)),
        ("numbered", NUMBERED, ("key=0",)),
    ):
        job = job_of_two(tmp_path / name, returned)
        code, said = run(job, tmp_path / name / "run", "train.epochs=2", *words)
        assert code == 0, said
        figures[name] = (table(tmp_path / name / "run/epochs.csv"), table(tmp_path / name / "run/predictions.csv"))
        assert float(figures[name][0][-1]["validation_accuracy"]) >= 0
    assert figures["plain"] == figures["keyed"] == figures["numbered"]


def test_several_outputs_without_a_key_are_validated_by_the_loss_and_that_is_said(tmp_path: Path) -> None:
    code, said = run(job_of_two(tmp_path, KEYED), tmp_path / "run")
    assert code == 0
    assert "the model returns 2 outputs (scores, first); say key=scores for more" in said
    row = table(tmp_path / "run/epochs.csv")[-1]
    assert float(row["validation_loss"]) > 0 and "validation_accuracy" not in row


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("metrics=[accuracy]",), r"metrics=accuracy was given, and the model returns 2 outputs .*; say key=scores"),
        (("key=score",), r"key=score was given, and the model returns no 'score'; did you mean scores\?"),
        (("metrics=[mae]", "key=scores"), r"mae needs as many numbers as targets; the output is 4x3, the target 4"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_step(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(job_of_two(tmp_path, KEYED), tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


def test_metrics_that_do_not_suit_an_output_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    words = "\n\ndef model():\n    return nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, (4, 3)))\n"
    words += "\n\ndef loss(output, target):\n    return F.cross_entropy(output.mean(1), target)\n"
    job.write_text(job.read_text() + words)
    code, said = run(job, tmp_path / "run")
    assert code == 0
    assert "accuracy needs classes along the second dimension; the output is 4x4x3, the target 4" in said
    assert set(table(tmp_path / "run/epochs.csv")[-1]) == {"epoch", "step", "loss", "validation_loss", "learning_rate"}


def test_infer_takes_the_output_that_the_run_named(tmp_path: Path) -> None:
    job = job_of_two(tmp_path, KEYED)
    run(job, tmp_path / "run", "key=scores")
    given = torch.rand(2, 6)
    network = load_network(str(job), weights=tmp_path / "run")
    assert network.key == "scores" and network.model(given).shape == (2, 3)
    other = load_network(str(job), weights=tmp_path / "run", key="first")
    assert other.model(given).shape == (2, 1)


def test_a_tensor_is_the_output_whatever_key_is_named() -> None:
    made = torch.rand(2, 3)
    assert pick(made, "aux") is made and pick({"one": made, "cache": ()}, None) is made
    assert pick({"one": made}, "two") is None and pick((made, made), "2") is None and pick([made], "x") is None


@pytest.mark.parametrize(
    ("metric", "output", "target", "fits"),
    [
        ("accuracy", (4, 3), (4,), True),
        ("accuracy", (4, 1), (4, 1), True),
        ("accuracy", (4,), (4,), True),
        ("dice", (1, 3, 8, 8), (1, 8, 8), True),
        ("dice", (1, 3, 8, 8), (1, 1, 8, 8), True),
        ("dice", (1, 3, 2, 2), (1, 8, 8), False),
        ("accuracy", (), (4,), False),
        ("auc", (4, 3), (4,), True),
        ("auc", (4, 3, 2), (4,), False),
        ("auc", (4, 3), (4, 3), False),
        ("rmse", (4, 1), (4,), True),
        ("rmse", (4, 2), (4,), False),
    ],
)
def test_whether_a_metric_can_be_had_depends_on_shapes(
    metric: str, output: tuple[int, ...], target: tuple[int, ...], fits: bool
) -> None:
    assert (unfit(metric, output, target) == "") == fits


def test_targets_of_another_kind_are_refused_where_metrics_were_asked_for() -> None:
    with pytest.raises(ConfigError, match="targets are no tensor"):
        check_asked(("accuracy",), None, {"": (4, 3)}, {"boxes": torch.rand(4)})
    check_asked((), None, {"": (4, 3)}, {"boxes": torch.rand(4)})
    assert chosen(("accuracy", "auc"), None, {}, torch.zeros(4)) == (("accuracy", "auc"), "")
