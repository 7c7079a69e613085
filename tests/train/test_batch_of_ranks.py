"""How large a batch is that nobody told, where several ranks share it."""

from __future__ import annotations

from pathlib import Path

import torch

from outcore.job import Job
from outcore.train.examples.supply import with_batch
from outcore.train.run_folder.folder import RunFolder
from outcore.train.settings.config import Config

JOB = Job(model=lambda: torch.nn.Linear(1, 1), batch=lambda n: (torch.rand(n, 1), None), size=2)


def test_every_rank_gets_an_example_where_nobody_said_how_many(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    asked = Config.read({"job": "job.py", "data": {"train": "slides.csv"}})
    assert with_batch(asked, JOB, folder, 4).train.batch == 4
    assert with_batch(asked, JOB, folder, 1).train.batch is None
    own = Config.read({"job": "job.py"})
    assert with_batch(own, JOB, folder, 2).train.batch is None  # the job's own can be shared
    told = Config.read({"job": "job.py", "train": {"batch": 1}})
    assert with_batch(told, JOB, folder, 4).train.batch == 1


def test_a_run_that_goes_on_has_the_batch_it_began_with(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    asked = Config.read({"job": "job.py", "data": {"train": "slides.csv"}})
    folder.open(with_batch(asked, JOB, folder, 4))
    folder.steps.write_text("")
    assert with_batch(asked, JOB, folder, 2).train.batch == 4
    assert with_batch(asked, JOB, folder, 1).train.batch == 4
