"""Metrics agree with scikit-learn and do not depend on how examples are cut into batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from outcore.errors import ConfigError
from outcore.train.metrics import default_metrics, make_metrics


def value(name: str, output: torch.Tensor, target: torch.Tensor, *, batch: int) -> float:
    metric = make_metrics([name])[name]
    for part, wanted in zip(output.split(batch), target.split(batch), strict=True):
        metric.add(part, wanted)
    return metric.value()


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_two_classes(batch: int) -> None:
    output, target = torch.randn(60, 2).round(decimals=1), torch.randint(2, (60,))
    scores = output.double().softmax(1)[:, 1].numpy()
    assert value("auc", output.double(), target, batch=batch) == pytest.approx(
        sklearn_metrics.roc_auc_score(target, scores)
    )
    assert value("accuracy", output, target, batch=batch) == pytest.approx(
        sklearn_metrics.accuracy_score(target, output.argmax(1))
    )


def test_many_classes() -> None:
    output, target = torch.randn(90, 4).double(), torch.randint(4, (90,))
    expected = sklearn_metrics.roc_auc_score(target, output.softmax(1), multi_class="ovr", average="macro")
    assert value("auc", output, target, batch=8) == pytest.approx(expected)


def test_one_output_is_a_logit() -> None:
    output, target = torch.randn(50, 1), torch.randint(2, (50,))
    assert value("auc", output, target, batch=9) == pytest.approx(
        sklearn_metrics.roc_auc_score(target, output[:, 0].double())
    )
    assert value("accuracy", output, target, batch=9) == pytest.approx(
        float(((output[:, 0] > 0) == target).float().mean())
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_dice_is_the_f1_score_of_pixels(batch: int) -> None:
    output, target = torch.randn(6, 3, 8, 9), torch.randint(3, (6, 8, 9))
    found = output.argmax(1).flatten().numpy()
    expected = sklearn_metrics.f1_score(target.flatten(), found, average=None, labels=[1, 2]).mean()
    assert value("dice", output, target, batch=batch) == pytest.approx(expected)


def test_values() -> None:
    output, target = torch.randn(30, 1), torch.randn(30)
    off = (output[:, 0] - target).numpy()
    assert value("mae", output, target, batch=4) == pytest.approx(np.abs(off).mean(), rel=1e-6)
    assert value("rmse", output, target, batch=4) == pytest.approx(np.sqrt((off**2).mean()), rel=1e-6)


def test_one_class_has_no_area_and_nothing_has_no_value() -> None:
    assert np.isnan(value("auc", torch.randn(5, 2), torch.ones(5, dtype=torch.int64), batch=5))
    assert all(np.isnan(m.value()) for m in make_metrics(["accuracy", "auc", "dice", "mae", "rmse"]).values())


def test_names() -> None:
    with pytest.raises(ConfigError, match="no metric 'acuracy'; did you mean accuracy"):
        make_metrics(["acuracy"])
    assert default_metrics(torch.zeros(4, dtype=torch.int64)) == ("accuracy", "auc")
    assert default_metrics(torch.zeros(4, 8, 8, dtype=torch.int64)) == ("dice", "accuracy")
    assert default_metrics(torch.zeros(4)) == ("mae",)
