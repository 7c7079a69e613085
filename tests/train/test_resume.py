"""A run that was interrupted ends where one that was not does, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from outcore.data import write_slides
from outcore.errors import CheckpointError, TrainError
from outcore.train.run_folder.journal import CsvTable
from outcore.train.settings.config import Config
from tests.foreign.sample import one_in

from .running import BREAK, TERMINATE, run, same, table, weights, write_job

WORDS = (
    *("train.epochs=4", "train.batch=3", "train.accumulate=2", "train.clip=1.0", "schedule.name=CosineAnnealingLR"),
    *("schedule.every=step", "checkpoint.every_steps=2"),
)
STEPS = 16
POINTS = sorted(random.Random(0).sample(range(STEPS * 2 - 2), 10))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    assert run(write_job(folder), folder / "run", *WORDS)[0] == 0
    return folder / "run"


@pytest.mark.parametrize("point", one_in(3, POINTS))
def test_a_run_asked_to_stop_anywhere_ends_with_the_same_weights(straight: Path, tmp_path: Path, point: int) -> None:
    code, said = run(write_job(tmp_path, stop_at=(point,)), tmp_path / "run", *WORDS)
    assert code == 128 + signal.SIGTERM and "run the same command again" in said
    assert len(table(tmp_path / "run" / "steps.csv")) == point // 2 + 1
    code, said = run(write_job(tmp_path), tmp_path / "run", *WORDS)
    assert code == 0 and "going on at" in said
    assert same(weights(tmp_path / "run"), weights(straight))
    for log in ("steps.csv", "epochs.csv"):
        without = ("memory_bytes",)  # counted in the second step of a process
        assert table(tmp_path / "run" / log, *without) == table(straight / log, *without)


@pytest.mark.parametrize("point", one_in(3, [3, 12, 25]))
def test_a_run_that_broke_goes_on_from_its_last_checkpoint(straight: Path, tmp_path: Path, point: int) -> None:
    with pytest.raises(RuntimeError, match="the power went out"):
        run(write_job(tmp_path, stop_at=(point,), how=BREAK), tmp_path / "run", *WORDS)
    assert run(write_job(tmp_path), tmp_path / "run", *WORDS)[0] == 0
    assert same(weights(tmp_path / "run"), weights(straight))
    assert table(tmp_path / "run" / "steps.csv", "memory_bytes") == table(straight / "steps.csv", "memory_bytes")


def test_the_same_command_again_changes_nothing_and_more_epochs_go_on(straight: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    short = (*(w for w in WORDS if "epochs" not in w and "schedule" not in w), "train.epochs=2")
    longer = (*short[:-1], "train.epochs=3")
    assert run(job, tmp_path / "one", *short)[0] == 0
    before = weights(tmp_path / "one")
    code, said = run(job, tmp_path / "one", *short)
    assert code == 0 and "is finished" in said and same(weights(tmp_path / "one"), before)
    assert run(job, tmp_path / "one", *longer)[0] == 0 and run(job, tmp_path / "two", *longer)[0] == 0
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))


def test_a_folder_of_another_run_is_not_touched(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    run(job, tmp_path / "run", "train.epochs=1")
    with pytest.raises(TrainError, match=r"holds another run: train\.seed was 0, now 1"):
        run(job, tmp_path / "run", "train.epochs=1", "train.seed=1")
    with pytest.raises(TrainError, match="holds a run already; go on with --resume auto"):
        run(job, tmp_path / "run", "train.epochs=1", "resume=never")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(TrainError, match="with other files in it"):
        run(job, tmp_path / "other", "train.epochs=1")


def test_a_signal_is_acknowledged_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(write_job(tmp_path, stop_at=(3,)), tmp_path / "run", *WORDS)
    assert capfd.readouterr().err.count("stopping when this step is done") == 1


def test_a_first_try_that_made_no_step_is_not_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the power went out"):
        run(write_job(tmp_path, stop_at=(0,), how=BREAK), tmp_path / "run", "train.epochs=1")
    words = ("train.epochs=1", "train.seed=1")
    assert run(write_job(tmp_path), tmp_path / "run", *words)[0] == 0
    assert run(write_job(tmp_path), tmp_path / "other", *words)[0] == 0
    assert same(weights(tmp_path / "run"), weights(tmp_path / "other"))


def test_a_torn_checkpoint_is_passed_over(straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(write_job(tmp_path, stop_at=(22,)), out, *WORDS)
    (newest,) = sorted((out / "checkpoints" / "last").glob("step-*"))[-1:]
    file = next(newest.glob("weights-*"))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.warns(UserWarning, match="passed over"):
        assert run(write_job(tmp_path), out, *WORDS)[0] == 0
    assert same(weights(out), weights(straight))


def test_a_run_can_begin_from_a_named_checkpoint(straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "first"
    run(write_job(tmp_path, stop_at=(14,)), out, *WORDS)
    words = (*WORDS, f"resume={out / 'checkpoints' / 'last'}")
    assert run(write_job(tmp_path), tmp_path / "second", *words)[0] == 0
    assert same(weights(tmp_path / "second"), weights(straight))
    with pytest.raises(CheckpointError, match="no good checkpoint in /nowhere"):
        run(write_job(tmp_path), tmp_path / "third", *WORDS, "resume=/nowhere")


def test_a_run_killed_in_its_very_first_checkpoint_begins_again_and_says_so(straight: Path, tmp_path: Path) -> None:
    job, out = write_job(tmp_path), tmp_path / "run"
    last = out / "checkpoints" / "last"
    with (
        pytest.raises(KeyboardInterrupt),
        mock.patch("outcore.run.checkpoint.files._finish", side_effect=KeyboardInterrupt),
    ):
        run(job, out, *WORDS)
    assert [path.name for path in last.iterdir()] == [".step-0000000004.partial"]
    for name in (".run.json.99999", ".report.html.99999", ".steps.csv.99999", ".owner.99999"):
        (out / name).write_text("half of")
    (out / ".mine.txt").write_text("the user's own")
    code, said = run(job, out, *WORDS)
    assert code == 0 and "came to no checkpoint; it begins again from the start" in said
    assert same(weights(out), weights(straight))
    assert sorted(path.name for path in out.glob(".*")) == [".mine.txt"]
    assert all(not path.name.startswith(".") for path in last.iterdir())


def test_a_checkpoint_that_is_not_there_is_an_error_also_where_a_run_could_go_on(tmp_path: Path) -> None:
    run(write_job(tmp_path, stop_at=(14,)), tmp_path / "run", *WORDS)
    with pytest.raises(CheckpointError, match="no good checkpoint in /nowhere, which --resume names"):
        run(write_job(tmp_path), tmp_path / "run", *WORDS, "resume=/nowhere")


def test_facts_of_a_run_that_cannot_be_understood_are_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(write_job(tmp_path, stop_at=(4,)), out, *WORDS)
    for text in ("[]", "null", "{", "", '{"position": 7}', '{"time_s": "long"}'):
        (out / "run.json").write_text(text)
        with pytest.raises(TrainError, match=r"run\.json"):
            run(write_job(tmp_path), out, *WORDS)
        assert (out / "run.json").read_text() == text


def test_a_log_that_was_cut_short_loses_its_last_row_and_nothing_else(tmp_path: Path) -> None:
    log = CsvTable(tmp_path / "steps.csv", ("step", "loss"))
    for step in range(13):
        log.add({"step": step, "loss": step / 2})
    whole = log.path.read_bytes()
    for torn in (whole[:-5], whole[:-4], whole[: whole.rindex(b"12") + 1], whole + b"\x00\xff,\n", whole + b"1"):
        log.path.write_bytes(torn)
        log.keep("step", 12)
        assert [row["step"] for row in table(log.path)] == [str(step) for step in range(12)]


def test_a_terminal_that_is_gone_saves_unless_it_was_to_be_ignored(tmp_path: Path) -> None:
    hang_up = TERMINATE.replace("SIGTERM", "SIGHUP")
    assert run(write_job(tmp_path, stop_at=(5,), how=hang_up), tmp_path / "run", *WORDS)[0] == 128 + signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert run(write_job(tmp_path, stop_at=(5,), how=hang_up), tmp_path / "other", *WORDS)[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)


STREAMED = """
import os, signal
import torch
from torch import nn
from torch.nn import functional as F

CALLS = 0

def model():
    local = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*local, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

def batch(size):
    return torch.rand(size, 3, 48, 64), torch.randint(2, (size,))

def loss(output, target):
    global CALLS
    CALLS += torch.is_grad_enabled()
    if CALLS == {stop}:
        os.kill(os.getpid(), signal.SIGTERM)
    return F.cross_entropy(output, target)
"""


def test_a_streamed_run_draws_the_same_masks_again(tmp_path: Path) -> None:
    data = write_slides(tmp_path / "data", 4, size=(48, 64), tile=16)
    words = (f"data.train={data}", "plan.tile=20", "train.epochs=2")
    for name, stops in (("straight", (0,)), ("stopped", (3, 0))):
        for stop in stops:
            (tmp_path / "job.py").write_text(STREAMED.replace("{stop}", str(stop or -1)))
            code, _ = run(tmp_path / "job.py", tmp_path / name, *words)
            assert code == (128 + signal.SIGTERM if stop else 0)
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "stopped"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL])
def test_a_real_process_is_signalled_and_started_again(straight: Path, tmp_path: Path, number: signal.Signals) -> None:
    how = TERMINATE.replace("signal.SIGTERM", f"signal.{number.name}")
    config = Config.read({"job": "job.py", "out": "run", "train": {"device": "cpu"}}, WORDS)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    command = [sys.executable, "-m", "outcore", "train", "run.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    write_job(tmp_path, stop_at=(13,), how=how)
    first = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert first.returncode == (-number if number == signal.SIGKILL else 128 + number), first.stderr
    write_job(tmp_path)
    second = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert same(weights(tmp_path / "run"), weights(straight))


@pytest.mark.slow
def test_what_one_process_saved_goes_on_on_two_ranks_and_back(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    text = write_job(tmp_path).read_text().replace("nn.Dropout(0.3), nn.BatchNorm1d(16), ", "")
    job.write_text(text)
    words = ["train.batch=4", "train.device=cpu", "train.accumulate=2", "watch=accuracy"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def go(out: str, epochs: int, ranks: int) -> None:
        command = [sys.executable, "-m", "outcore", "train", "job.py", "--out", out, "--ranks", str(ranks), *words]
        done = subprocess.run(
            [*command, f"train.epochs={epochs}"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    go("straight", 3, 1)
    go("changing", 1, 1)
    go("changing", 2, 2)
    go("changing", 3, 1)
    one, two = weights(tmp_path / "straight"), weights(tmp_path / "changing")
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-6), name


KEYS = "os.environ['RANK'] == '1' and os.killpg(os.getpgid(os.getppid()), signal.SIGINT)"  # Ctrl-C in a terminal


@pytest.mark.slow
@pytest.mark.parametrize("how", ["os.kill(os.getppid(), signal.SIGTERM)", KEYS], ids=["asked", "keys"])
def test_two_ranks_asked_to_stop_save_together_and_go_on(tmp_path: Path, how: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "outcore", "train", "job.py", "--ranks", "2", "--device", "cpu", "--epochs", "2"]

    def go(out: str) -> subprocess.CompletedProcess[str]:
        told: dict[str, Any] = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        return subprocess.run([*command, "--out", out], start_new_session=True, **told)

    def write(**options: Any) -> None:
        job = write_job(tmp_path, **options)  # one sample a micro-batch is too few for batch norm
        job.write_text(job.read_text().replace("nn.BatchNorm1d(16), ", ""))

    write()
    assert go("straight").returncode == 0
    write(stop_at=(5,), how=how)
    stopped = go("stopped")
    assert stopped.returncode == 128 + (signal.SIGINT if how == KEYS else signal.SIGTERM), stopped.stderr
    write()
    assert go("stopped").returncode == 0
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "stopped"))
