"""A whole run: the weights of a plain loop, and every kind of trouble named, counted and handled as told."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tifffile
import torch
from torch.nn import functional as F

from outcore.errors import CheckpointError, ConfigError, DataError, JobError, PlanError, TrainError
from outcore.job import Job
from outcore.run.checkpoint.restore import find_checkpoint
from outcore.run.ranks.world import World
from outcore.train.examples.examples import OwnExamples
from outcore.train.examples.feed import Feed
from outcore.train.run_folder.folder import RunFolder
from outcore.train.runners.runner import PlainRunner

from .running import SLIDES, run, same, slide_job, table, weights, write_job


def test_the_weights_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    assert run(path, tmp_path / "run", "train.epochs=2", "train.batch=4", "train.seed=3", "train.clip=0.5")[0] == 0
    job = Job.load(str(path))
    assert job.dataset is not None and job.optimizer is not None
    torch.manual_seed(3)
    net = job.build()
    optimizer = job.optimizer(net.parameters())
    feed = Feed(OwnExamples(job.dataset("train")), 4, seed=3)
    for epoch in range(2):
        for (batch,) in feed.epoch(epoch):
            optimizer.zero_grad()
            F.cross_entropy(net(batch.inputs), batch.targets).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        net.eval()
        with torch.no_grad():
            held = OwnExamples(job.dataset("validation"))
            losses = [
                (F.cross_entropy(net(b.inputs), b.targets).item(), b.examples)
                for (b,) in Feed(held, 4, training=False).epoch(0)
            ]
        net.train()
    assert same(weights(tmp_path / "run"), dict(net.state_dict()))
    last = table(tmp_path / "run" / "epochs.csv")[-1]
    assert float(last["validation_loss"]) == pytest.approx(sum(v * n for v, n in losses) / 9, rel=1e-6)


def test_what_is_left_behind_can_be_read_without_outcore(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run(write_job(tmp_path), tmp_path / "run", "train.epochs=3", "watch=accuracy")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["ended"] == "finished" and facts["position"]["step"] == 18
    assert facts["measured"]["steps"] == 18 and facts["measured"]["peak_bytes"] > 0
    assert facts["classes"] == []
    stored = find_checkpoint(World(0, 1, 0, None, None, owned=False), RunFolder(tmp_path / "run").last)
    counts = {name: stored.document[name] for name in ("ranks", "samples", "skipped", "step")}
    assert counts == {"ranks": 1, "samples": 3 * 24, "skipped": 0, "step": 18}
    (best,) = (tmp_path / "run" / "checkpoints" / "best").glob("step-*/weights-*")
    net = Job.load(str(tmp_path / "job.py")).build()
    net.load_state_dict(load_file(best))
    epochs = table(tmp_path / "run" / "epochs.csv")
    accuracies = [float(row["validation_accuracy"]) for row in epochs]
    assert facts["position"]["best"] == pytest.approx(max(accuracies), rel=1e-6)


def test_batches_of_a_job_without_data(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    path.write_text(path.read_text().replace("def dataset", "def other"))
    with pytest.raises(ConfigError, match=r"makes its own batches.*train\.steps=100"):
        run(path, tmp_path / "run")
    assert run(path, tmp_path / "run", "train.steps=3", "train.batch=4")[0] == 0
    assert len(table(tmp_path / "run" / "steps.csv")) == 3


def test_early_stopping(tmp_path: Path) -> None:
    words = ("train.epochs=30", "train.patience=2", "optimizer.lr=0.0")
    _, said = run(write_job(tmp_path), tmp_path / "run", *words, "watch=accuracy")
    best = json.loads((tmp_path / "run" / "run.json").read_text())["position"]["best_epoch"]
    epochs = [float(row["validation_accuracy"]) for row in table(tmp_path / "run" / "epochs.csv")]
    assert "stopped early" in said and len(epochs) == best + 3 < 30
    assert epochs[best] == max(epochs) and epochs.index(max(epochs)) == best


def test_streamed_in_tiles_the_losses_are_those_of_whole_slides(tmp_path: Path) -> None:
    job, data = slide_job(tmp_path)
    words = (f"data.train={data}", "data.validation=0.25", "train.epochs=2")
    run(job, tmp_path / "plain", *words)
    _, said = run(job, tmp_path / "tiles", *words, "plan.tile=24")
    assert "tiles of 24 pixels" in said
    for one, two in zip(*(table(tmp_path / n / "steps.csv") for n in ("plain", "tiles")), strict=True):
        assert float(one["loss"]) == pytest.approx(float(two["loss"]), abs=1e-5)


def test_a_bad_slide_is_named_and_stops_or_is_skipped_and_listed(tmp_path: Path) -> None:
    job, data = slide_job(tmp_path)
    (data.parent / "slides-001.tif").write_bytes(b"MM nothing")
    with pytest.raises(DataError, match=r"line 3: .*slides-001\.tif.*on_bad=skip"):
        run(job, tmp_path / "run", f"data.train={data}")
    code, said = run(job, tmp_path / "run2", f"data.train={data}", "data.on_bad=skip", "train.epochs=2")
    assert code == 0 and said.count("skipped: ") == 1 and "slides-001.tif" in said
    listed = (tmp_path / "run2" / "bad.csv").read_text()
    assert "slides-001.tif" in listed and len(listed.splitlines()) == 2
    assert "slides-001.tif" in (tmp_path / "run2" / "report.html").read_text()


def test_damage_found_while_streaming_is_treated_the_same(tmp_path: Path) -> None:
    job, data = slide_job(tmp_path)
    path = data.parent / "slides-002.tif"
    with tifffile.TiffFile(path) as file:
        offset, count = file.pages[0].dataoffsets[1], file.pages[0].databytecounts[1]
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * count)
    words = (f"data.train={data}", "plan.tile=24", "train.epochs=2")
    with pytest.raises(DataError, match=r"slides-002\.tif: tile \(0, 1\) of level 0"):
        run(job, tmp_path / "run", *words)
    code, said = run(job, tmp_path / "run2", *words, "data.on_bad=skip")
    assert code == 0 and said.count("skipped: ") == 1 and len(table(tmp_path / "run2" / "steps.csv")) == 6
    code, said = run(job, tmp_path / "run3", *words, "data.on_damage=white")
    assert code == 0 and len(table(tmp_path / "run3" / "steps.csv")) == 8
    assert "read as glass: 1 damaged tile; the first: " in said


def test_a_label_the_network_cannot_give_is_named_before_training(tmp_path: Path) -> None:
    job, data = slide_job(tmp_path)
    data.write_text(data.read_text().replace("slides-002.tif,0", "slides-002.tif,5").replace("002.tif,1", "002.tif,5"))
    with pytest.raises(
        TrainError, match=r"slides\.csv, line 4 .*: label 5; the network has 2 outputs, for labels 0 to 1"
    ):
        run(job, tmp_path / "run", f"data.train={data}")


def not_finite(path: Path) -> Path:
    path.write_text(
        path.read_text().replace(
            "return F.cross", "factor = float('nan') if CALLS == 4 else 1.0\n    return factor * F.cross"
        )
    )
    return path


def test_a_loss_that_is_not_a_number_stops_the_run_with_its_example(tmp_path: Path) -> None:
    job = not_finite(write_job(tmp_path))
    with pytest.raises(TrainError, match=r"the loss of step 4 is nan \(dataset\('train'\)\[\d+\].*\); try a smaller"):
        run(job, tmp_path / "run", "checkpoint.every_steps=2")
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run").values())
    assert json.loads((tmp_path / "run" / "run.json").read_text())["ended"] == "failed"


def test_or_is_skipped_and_counted(tmp_path: Path) -> None:
    code, said = run(not_finite(write_job(tmp_path)), tmp_path / "run", "train.on_nan=skip")
    assert code == 0 and "the weights were left alone (1 so far)" in said and "1 step had no finite loss" in said
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run").values())


@pytest.mark.parametrize("number", ["inf", "nan"])
def test_a_loss_that_is_never_finite_ends_the_run_instead_of_training_nothing(tmp_path: Path, number: str) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace("return F.cross", f"return float({number!r}) * F.cross"))
    with pytest.raises(TrainError, match="no step of epoch 1 had a finite loss, so nothing was learned"):
        run(job, tmp_path / "run", "train.on_nan=skip")
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_figure_that_is_not_measured_cannot_be_watched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="watch=dice was given, and this run measures only the loss and acc"):
        run(write_job(tmp_path), tmp_path / "run", "watch=dice")


LAST_LINE = "return F.cross_entropy(output, target)"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("SGD(parameters, ", "SGD([torch.nn.Parameter(torch.ones(2))], ", "holds 1 parameters and none of the 6"),
        (
            "return F.cross_entropy(output, target)",
            "return F.cross_entropy(output.detach(), target)",
            "does not depend",
        ),
        (LAST_LINE, "return OTHER.sum()", "gave no parameter of the model a gradient"),
        (LAST_LINE, "return 1.0", "returned float; it must return a tensor"),
        (LAST_LINE, "return output", "of shape .4, 3.; it must be one number"),
        ("size = 4", 'size = "4"', "size of .* is '4'; it must be a whole number"),
        ("size = 4", "size = -3", "it must be a whole number of at least 1"),
        ("size = 4", "raise SystemExit(0)", "cannot be imported.*SystemExit"),
    ],
)
def test_what_can_teach_nothing_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    job = write_job(tmp_path)
    assert old in job.read_text()
    job.write_text(job.read_text().replace(old, new) + "\nOTHER = nn.Parameter(torch.ones(2))\n")
    with pytest.raises((TrainError, JobError), match=said):
        run(job, tmp_path / "run")


def test_out_of_memory_is_tried_once_more_and_then_said(tmp_path: Path) -> None:
    job, step, calls = write_job(tmp_path), PlainRunner.step, [0]

    def fail(self: PlainRunner, batches: Any, *, often: int) -> Any:
        calls[0] += 1
        if 3 <= calls[0] < 3 + often:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return step(self, batches)

    with mock.patch.object(PlainRunner, "step", lambda s, b: fail(s, b, often=2)):
        with pytest.raises(TrainError, match=r"out of memory in step 3 .*Tried to allocate 9 GiB; give a budget"):
            run(job, tmp_path / "run")
    calls[0] = 0
    with mock.patch.object(PlainRunner, "step", lambda s, b: fail(s, b, often=1)):
        code, said = run(job, tmp_path / "run2", "plan.memory=1MiB")
    assert code == 0 and "out of memory in step 3; planned again for 870.4 KiB" in said
    assert run(job, tmp_path / "run3")[0] == 0
    assert same(weights(tmp_path / "run2"), weights(tmp_path / "run3"))


def test_a_full_disk_is_said_and_the_last_good_checkpoint_kept(tmp_path: Path) -> None:
    from outcore.run.checkpoint import files

    job, save, calls = write_job(tmp_path), files.save_file, [0]

    def full(*args: Any) -> None:
        calls[0] += 1
        if calls[0] > 6:
            raise OSError(28, "No space left on device")
        save(*args)

    with mock.patch.object(files, "save_file", full):
        code, said = run(job, tmp_path / "run", "train.epochs=3", "optimizer.lr=0.0")
    assert code == 1 and "No space left on device" in said and "the last weights are not saved" in said
    assert weights(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["checkpoints_lost"] > 0
    code, said = run(job, tmp_path / "run", "train.epochs=3", "optimizer.lr=0.0")
    assert code == 0 and "going on at" in said and "finished after 18 steps" in said


def test_a_report_that_cannot_be_written_does_not_hide_the_run(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    with mock.patch("outcore.train.application.write_ending", side_effect=full):
        code, said = run(write_job(tmp_path), tmp_path / "run")
    assert code == 0 and "the report could not be written: No space left on device" in said
    assert "\nreport: " not in said  # what is not there is not named


def test_half_precision_and_values_to_regress(tmp_path: Path) -> None:
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", np.full((3, 40, 40), i * 20, np.uint8))
    (tmp_path / "t.csv").write_text("path,label\n" + "".join(f"{i}.npy,{i / 4}\n" for i in range(4)))
    (tmp_path / "job.py").write_text(SLIDES.replace("SlideNet(width=2)", "SlideNet(1, width=2)"))
    words = (f"data.train={tmp_path / 't.csv'}", "data.validation=0.5", "train.precision=bf16", "data.crop=32")
    assert run(tmp_path / "job.py", tmp_path / "run", *words)[0] == 0
    assert "validation_mae" in table(tmp_path / "run" / "epochs.csv")[0]


def test_what_is_asked_for_and_not_installed_is_said_in_one_line(tmp_path: Path) -> None:
    found = importlib.util.find_spec
    with mock.patch("importlib.util.find_spec", lambda name, *rest: None if name == "wandb" else found(name, *rest)):
        with pytest.raises(ConfigError, match="wandb is not installed; type: pip install wandb"):
            run(write_job(tmp_path), tmp_path / "run", "log.wandb=project")


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    run(job, tmp_path / "run", "train.epochs=1")
    job.write_text(job.read_text().replace("16", "17"))
    with pytest.raises(CheckpointError, match="another model"):
        run(job, tmp_path / "run", "train.epochs=2")


@pytest.mark.parametrize(
    ("kept", "left"), [((), []), (("runs",), ["runs"]), (("runs/notes.txt",), ["runs", "runs/notes.txt"])]
)
def test_a_run_that_fails_before_its_first_step_leaves_no_folder_that_it_made(
    tmp_path: Path, kept: tuple[str, ...], left: list[str]
) -> None:
    job = write_job(tmp_path / "jobs")
    for name in kept:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).touch() if name.endswith(".txt") else (tmp_path / "out" / name).mkdir()
    with pytest.raises(TrainError, match="the budget is"):
        run(job, tmp_path / "out/runs/first", "plan.memory=1KiB")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*"))
    assert found == left and (tmp_path / "out").exists() == bool(kept)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"no file .*p\.json; make one with: outcore plan .*job\.py --devices 2 -o .*p\.json"),
        (
            '{"format": 1, "graph": "0", "stages": [["0"]], "schedule": "zigzag"}',
            "schedule is 'zigzag'; expected one of",
        ),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused_once_before_ranks_are_started(
    tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "p.json").write_text(text)
    with pytest.raises(PlanError, match=said):  # a rank's own error would end as an exit code
        run(write_job(tmp_path), tmp_path / "run", f"plan.file={tmp_path / 'p.json'}", "plan.ranks=2")
    assert not (tmp_path / "run").exists()


def test_a_file_where_the_run_would_go_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    with pytest.raises(TrainError, match=r"job\.py, where the run would go, is a file; say another --out"):
        run(job, job)


def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert run(write_job(tmp_path), tmp_path / "run", "log.tensorboard=true")[0] == 0
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"epoch/validation_loss" in content and b"learning_rate" in content


def test_a_logger_that_fails_is_left_out_and_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[Any] = []

    def init(**given: Any) -> Any:
        runs.append(mock.Mock(id=given["id"] or "first"))
        runs[-1].log.side_effect = ConnectionError("the server is gone") if len(runs) == 1 else None
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=init, __spec__=mock.Mock()))
    job = write_job(tmp_path)
    assert run(job, tmp_path / "run", "log.wandb=p")[0] == 0
    assert "wandb: the server is gone; training goes on without it" in capsys.readouterr().err
    assert runs[0].log.call_count == 1
    assert run(job, tmp_path / "run", "log.wandb=p", "train.epochs=2")[0] == 0
    assert runs[1].id == "first" and runs[1].log.call_count == 7


def test_a_logger_that_does_not_start_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mock.Mock(init=mock.Mock(side_effect=OSError("no key\nlong story")), __spec__=mock.Mock())
    monkeypatch.setitem(sys.modules, "wandb", broken)
    with pytest.raises(ConfigError, match=r"wandb does not start: no key$"):
        run(write_job(tmp_path), tmp_path / "run", "log.wandb=p")
