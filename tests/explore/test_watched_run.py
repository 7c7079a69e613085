"""A run's folder on the page: its figures and its recorded step, read again when they change, and nothing else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from outcore.errors import OutcoreError
from outcore.explore import watched_run
from outcore.explore.parts import default_folder
from outcore.explore.watched_run import run_piece, settings_of_run, watch_run
from outcore.program import Stages, compile_program, save_trace, simulate
from outcore.train.settings.config import Config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `outcore train` leaves of a run of two ranks that goes on."""
    given = {"job": "job.py", "arguments": ["width=3"], "train": {"batch": 6}, "plan": {"memory": "8GiB", "ranks": 2}}
    (tmp_path / "config.yaml").write_text(Config.read(given, []).to_yaml())
    (tmp_path / "run.json").write_text(json.dumps({"ended": None, "measured": {"step_s": 0.25}}))
    (tmp_path / "steps.csv").write_text("step,loss,time_s\n0,0.7,0.2\n1,nan,0.3\n")
    return tmp_path


def test_a_run_s_settings_are_what_is_looked_at(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = settings_of_run(folder)
    assert (settings.job, settings.arguments, settings.batch) == ("job.py", ("width=3",), 6)
    assert (settings.memory, settings.devices, settings.run) == ("8GiB", 2, str(folder))
    with pytest.raises(OutcoreError, match="without a run"):
        settings_of_run(tmp_path_factory.mktemp("empty"))
    assert default_folder("a/job.py") == Path("runs/job") and default_folder("x.y:Net") == Path("runs/Net")


def test_what_a_run_recorded_is_read_back_from_its_trace(folder: Path) -> None:
    assert run_piece(folder / "nothing") is None
    before = run_piece(folder)
    assert before is not None and before["recorded"] is None and before["steps"]["loss"] == [0.7, None]
    stages = Stages.uniform(2, saved_bytes=1 << 20, edge_bytes=8, gradient_bytes=1 << 10)
    timeline = simulate(compile_program(stages, "gpipe", micro_batches=3), stages)
    save_trace(timeline, folder / "trace.json")
    piece = run_piece(folder)
    assert piece is not None
    found = piece["recorded"]
    assert found["ranks"] == 2 and found["step_s"] == pytest.approx(timeline.step_s)
    assert [m["peak_bytes"] for m in found["memory"]] == list(timeline.peak_bytes)
    assert len(found["events"]) == sum(e.end_s > e.start_s for e in timeline.events)


def test_a_folder_is_read_again_when_a_file_changes_and_half_a_file_is_waited_for(folder: Path) -> None:
    shown: list[dict[str, Any]] = []

    async def session() -> None:
        watching = asyncio.create_task(watch_run(folder, shown.append))
        await until(lambda: len(shown) == 1)
        await asyncio.sleep(0.1)
        assert len(shown) == 1  # nothing has changed
        (folder / "run.json").write_text('{"ended": ')
        await asyncio.sleep(0.1)
        assert len(shown) == 1
        (folder / "run.json").write_text('{"ended": "finished"}')
        await until(lambda: len(shown) == 2)
        watching.cancel()

    async def until(what: Any) -> None:
        async with asyncio.timeout(20):
            while not what():
                await asyncio.sleep(0.01)

    with mock.patch.object(watched_run, "_EVERY_S", 0.02):
        asyncio.run(session())
    assert [piece["ended"] for piece in shown] == [None, "finished"]
