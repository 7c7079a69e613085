"""Optimizers and schedules of torch by name; what does not fit is said before the run begins."""

from __future__ import annotations

import pytest
import torch

from outcore.errors import ConfigError
from outcore.job import Job
from outcore.train.settings.config import Config, OptimizerConfig, ScheduleConfig
from outcore.train.settings.schedules import make_optimizer, make_schedule

JOB = Job(lambda: torch.nn.Linear(2, 2), lambda size: (torch.zeros(size, 2), None))
OWN = Job(JOB.model, JOB.batch, optimizer=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2))]


def test_the_name_wins_then_the_job_then_adamw() -> None:
    assert type(make_optimizer(OptimizerConfig(), JOB)(weights())) is torch.optim.AdamW
    own = make_optimizer(OptimizerConfig(), OWN)(weights())
    assert type(own) is torch.optim.SGD and own.param_groups[0]["lr"] == 0.5
    named = make_optimizer(OptimizerConfig("RMSprop", 0.1, {"alpha": 0.5}), OWN)(weights())
    assert type(named) is torch.optim.RMSprop and named.param_groups[0]["alpha"] == 0.5


def test_a_learning_rate_alone_goes_over_the_jobs_own() -> None:
    own = make_optimizer(OptimizerConfig(lr=0.25), OWN)(weights())
    assert own.param_groups[0]["lr"] == 0.25 and own.param_groups[0]["momentum"] == 0.9


def test_a_cosine_is_as_long_as_the_run() -> None:
    optimizer = torch.optim.SGD(weights(), lr=1.0)
    schedule = make_schedule(ScheduleConfig("CosineAnnealingLR", "step"), optimizer, epochs=2, steps=5)
    assert schedule is not None
    for _ in range(10):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_one_cycle_knows_its_length() -> None:
    optimizer = torch.optim.SGD(weights(), lr=1.0, momentum=0.9)
    made = make_schedule(ScheduleConfig("OneCycleLR", "step", {"max_lr": 1.0}), optimizer, epochs=2, steps=5)
    assert made is not None and made.total_steps == 10  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.name=AdmaW"], "AdmaW is not in torch; did you mean AdamW"),
        (["optimizer.name=SGD", "optimizer.arguments.momentun=1"], "no argument 'momentun'; did you mean momentum"),
        (["schedule.name=CosineLR"], "CosineLR is not in torch; did you mean Cosine"),
        (["schedule.name=StepLR"], "StepLR needs schedule.arguments.step_size"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], said: str) -> None:
    config = Config.read({}, words)
    with pytest.raises(ConfigError, match=said):
        optimizer = make_optimizer(config.optimizer, JOB)(weights())
        make_schedule(config.schedule, optimizer, epochs=1, steps=1)


def test_arguments_for_the_jobs_own_optimizer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs optimizer\.name"):
        make_optimizer(OptimizerConfig(arguments={"lr": 1}), OWN)
