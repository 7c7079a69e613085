"""What a worker says of a job, asked in this process: its files, its pieces, its answers, what goes wrong."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outcore.errors import JobError, OutcoreError
from outcore.explore.many_devices import pipeline_json
from outcore.explore.measured_step import _total
from outcore.explore.worker import _answer, _explore, _watched, trouble_of
from outcore.job import Job
from outcore.machine import parse
from tests.explore.jobs import SMALL, line_of, write


def explored(path: Path, *requests: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    said: list[dict[str, Any]] = []
    settings = {"job": str(path), "machine": "v100", "seconds": 0.1, "search_s": 0.01, "inputs": []}
    return _explore(settings, waiting, said.append), said


def test_a_job_s_files_come_first_then_the_network_then_the_rest_and_questions_in_between(tmp_path: Path) -> None:
    path = write(tmp_path)
    asked = {"policy": {}, "change": {"first": "recompute"}}
    found, said = explored(
        path, {"simulate": asked, "id": 7}, {"simulate": {"policy": {}, "change": {"x": "keep"}}, "id": 8}
    )
    assert found is not None and said[-1] == {"done": True}
    assert str(path) in said[0]["files"] and not any("-packages" in file for file in said[0]["files"])
    assert {"about", "graph"} <= set(said[1]["pieces"])
    first, second = (m for m in said if "answer" in m)
    assert first["answer"] == 7 and first["value"]["document"]["policy"] and first["value"]["over_plain"] > 1
    assert second["answer"] == 8 and "no block 'x'" in second["error"]
    assert any("plans" in m["pieces"] for m in said if "pieces" in m)


def test_an_error_of_the_job_is_said_with_its_line(tmp_path: Path) -> None:
    text = SMALL.replace("b = self.second(a)", "b = self.third(a)")
    found, said = explored(write(tmp_path, text))
    assert found is None and set(said[-1]) == {"trouble"}
    trouble = said[-1]["trouble"]
    assert trouble["kind"] == "AttributeError" and "third" in trouble["message"] and "self.third(a)" in trouble["trace"]
    assert trouble["place"].endswith(f"job.py:{line_of(text, 'self.third(a)')}")
    answers: list[dict[str, Any]] = []
    _answer({"simulate": {}, "id": 3}, found, answers.append)
    assert answers == [{"answer": 3, "error": "there is no network to simulate; see the message above"}]


def test_trouble_is_told_by_its_first_cause_and_an_error_without_words_by_its_name() -> None:
    with pytest.raises(JobError) as caught:
        try:
            try:
                raise KeyError("weights")
            except KeyError as error:
                raise OutcoreError("the weights are not there") from error
        except OutcoreError as error:
            raise JobError("job.py cannot be used") from error
    assert trouble_of(caught.value)["kind"] == "KeyError"
    assert trouble_of(caught.value)["message"] == "job.py cannot be used"
    assert trouble_of(SystemExit())["message"] == "SystemExit"


def test_the_file_of_a_job_is_watched_also_where_its_network_is_someone_else_s(tmp_path: Path) -> None:
    text = "import torch\n\nmodel = lambda: torch.nn.Linear(4, 2)\nbatch = lambda size: (torch.rand(size, 4), None)\n"
    path = write(tmp_path, text)
    settings: Any = SimpleNamespace(settings=SimpleNamespace(job=str(path)), sources=[])
    assert _watched(settings) == [str(path.resolve())]
    settings.settings.job = "torch.nn:Linear"
    assert str(path.resolve()) not in _watched(settings)


def test_a_step_without_a_loss_has_one_unless_nothing_has_a_gradient() -> None:
    x = torch.full((3,), 2.0, requires_grad=True)
    assert float(_total([x, {"a": torch.ones(9)}, (x * 2,)]).detach()) == 4.0 + 16.0
    with pytest.raises(OutcoreError, match="nothing that the model returns has a gradient"):
        _total(torch.ones(2))


def test_devices_share_the_batch_that_was_asked_for(tmp_path: Path) -> None:
    job, where = Job.load(str(write(tmp_path))), parse("v100x2")
    asked, own = (pipeline_json(job, where, 2, size) for size in (64, None))
    assert asked["devices"] == own["devices"] == 2 and "refused" not in asked
    assert asked["step_s"] != own["step_s"]
