"""What a worker says of a job, asked in this process: its files, its pieces, its answers, what goes wrong."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from outcore.errors import JobError, OutcoreError
from outcore.explore.worker import _answer, _explore, trouble_of
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
