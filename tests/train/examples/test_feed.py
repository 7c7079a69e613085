"""Every example once an epoch, in an order that depends on seed and epoch alone, and nothing lost on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outcore.data import Batch, DataError, write_slides
from outcore.job import Job
from outcore.train.examples.examples import OwnExamples, SlideExamples, find_tables
from outcore.train.examples.feed import Feed, JobFeed
from outcore.train.settings.config import DataConfig

TEN = OwnExamples([(torch.tensor([float(i)]), i) for i in range(10)])


def seen(feed: Feed | JobFeed, epoch: int, start: int = 0) -> list[list[int]]:
    return [[int(t) for m in step for t in m.targets] for step in feed.epoch(epoch, start)]


@pytest.mark.parametrize(("batch", "accumulate"), [(1, 1), (3, 1), (2, 2), (4, 3), (10, 1)])
def test_every_example_once_an_epoch(batch: int, accumulate: int) -> None:
    feed = Feed(TEN, batch, accumulate)
    steps = seen(feed, 0)
    assert len(steps) == feed.steps and sorted(n for step in steps for n in step) == list(range(10))
    assert seen(feed, 1) != steps and seen(feed, 0) == steps
    assert seen(Feed(TEN, batch, accumulate, seed=1), 0) != steps


def test_an_epoch_can_be_entered_in_the_middle() -> None:
    feed = Feed(TEN, 2)
    assert [seen(feed, 3, start) for start in range(6)] == [seen(feed, 3)[start:] for start in range(6)]


def test_validation_is_in_order() -> None:
    assert [n for step in seen(Feed(TEN, 3, training=False), 5) for n in step] == list(range(10))


def test_replicas_share_every_micro_batch_without_gap_or_double() -> None:
    whole = seen(Feed(TEN, 4, 1), 2)
    halves = [seen(Feed(TEN, 4, 1, replica=(r, 2), whole_steps=True), 2) for r in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == whole[:2]


def test_batches_of_a_job_can_be_made_again_and_leave_the_random_numbers_alone() -> None:
    job = Job(lambda: torch.nn.Linear(1, 1), lambda size: (torch.rand(size, 1), torch.randint(1000, (size,))))
    feed = JobFeed(job, 2, 2, steps=4)
    state = torch.get_rng_state()
    whole = seen(feed, 0)
    assert torch.equal(state, torch.get_rng_state())
    assert seen(feed, 0, 2) == whole[2:] and seen(feed, 1) != whole and len(whole[0]) == 4


def test_replicas_share_the_batch_that_a_job_makes() -> None:
    """On two ranks a step trained on two batches, each of the size that was asked for once."""
    job = Job(model=lambda: torch.nn.Linear(1, 1), batch=lambda n: (torch.rand(n, 1), torch.rand(n)))
    whole = next(JobFeed(job, 4, 1, steps=1).epoch(0))[0]
    shares = [next(JobFeed(job, 4, 1, steps=1, replica=(i, 2)).epoch(0))[0] for i in range(2)]
    assert torch.equal(torch.cat([share.inputs for share in shares]), whole.inputs)
    assert torch.equal(torch.cat([share.targets for share in shares]), whole.targets)
    assert [share.examples for share in shares] == [2, 2]


def test_crops_depend_on_the_seed_the_epoch_and_the_slide_alone(tmp_path: Path) -> None:
    table = write_slides(tmp_path, 4, size=(96, 128), tile=32, masks=True)
    examples, _ = find_tables(DataConfig(train=str(table), crop=24), seed=5)
    first = Feed(examples, 1).epoch(0)
    again = Feed(examples, 1).epoch(0, 2)
    next(first), next(first)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one[0].inputs, two[0].inputs) and one[0].inputs.shape == (1, 3, 24, 24)
        assert one[0].targets.shape == (1, 24, 24)
    other = [m[0].inputs for m in Feed(examples, 1, training=True).epoch(1)]
    assert any(not torch.equal(a[0].inputs, b) for a, b in zip(Feed(examples, 1).epoch(0), other, strict=True))


def test_a_lazy_feed_reads_nothing(tmp_path: Path) -> None:
    examples, _ = find_tables(DataConfig(train=str(write_slides(tmp_path, 2, size=(64, 64), tile=32))), seed=0)
    (lazy,) = next(Feed(examples, 2, lazy=True, mean=(0.5,) * 3).epoch(0))
    (read,) = next(Feed(examples, 2, mean=(0.5,) * 3).epoch(0))
    assert isinstance(lazy.inputs, Batch) and torch.equal(lazy.inputs.tensor(), read.inputs)


def test_a_bad_slide_is_left_out_of_its_step(tmp_path: Path) -> None:
    table = write_slides(tmp_path, 4, size=(64, 64), tile=32)
    (tmp_path / "slides-002.tif").write_bytes(b"II")
    examples, _ = find_tables(DataConfig(train=str(table), on_bad="skip"), seed=0)
    names = [n for step in Feed(examples, 2).epoch(0) for m in step for n in m.names]
    assert len(names) == 3 and [bad.path.name for bad in examples.table.bad] == ["slides-002.tif"]
    strict, _ = find_tables(DataConfig(train=str(table)), seed=0)
    with pytest.raises(DataError, match=r"line 4.*slides-002\.tif"):
        list(Feed(strict, 2).epoch(0))


def test_of_a_step_that_a_runner_could_not_read_the_slide_that_is_named_is_left_out(tmp_path: Path) -> None:
    table = write_slides(tmp_path, 4, size=(64, 64), tile=32)
    for told, left_out in ((f"{tmp_path}/slides-001.tif is cut off", {"slides-001.tif"}), ("the disk is gone", None)):
        examples, _ = find_tables(DataConfig(train=str(table), on_bad="skip"), seed=0)
        feed = Feed(examples, 2, 2, training=False, lazy=True)
        step = next(iter(feed.epoch(0)))
        feed.unreadable(step, DataError(told))
        every = {Path(name).name for m in step for name in m.names}
        assert len(every) == 4 and {bad.path.name for bad in examples.table.bad} == (left_out or every)


def test_a_share_set_aside_is_never_trained_on(tmp_path: Path) -> None:
    for i in range(10):
        np.save(tmp_path / f"{i}.npy", np.zeros((1, 4, 4), np.float32))
    (tmp_path / "t.csv").write_text("path,label\n" + "".join(f"{i}.npy,{i}\n" for i in range(10)))
    train, held = find_tables(DataConfig(train=str(tmp_path / "t.csv"), validation=0.3), seed=0)
    assert held is not None
    parts = [{Path(e.name(i)).stem for i in range(len(e))} for e in (train, held)]
    assert len(parts[1]) == 3 and parts[0] | parts[1] == set("0123456789") and not parts[0] & parts[1]
    for seed in range(8):  # of each class its share, the rare one too
        (tmp_path / "t.csv").write_text("path,label\n" + "".join(f"{i}.npy,{i // 6}\n" for i in range(10)))
        _, held = find_tables(DataConfig(train=str(tmp_path / "t.csv"), validation=0.5), seed=seed)
        assert held is not None
        assert sorted(int(Path(held.name(i)).stem) // 6 for i in range(len(held))) == [0, 0, 0, 1, 1]


def test_a_folder_of_images_by_class(tmp_path: Path) -> None:
    from PIL import Image

    for number, name in enumerate(("ants", "bees")):
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.new("RGB", (40 + 8 * i, 30), (100 * number, 0, 0)).save(tmp_path / name / f"{i}.png")
    examples, _ = find_tables(DataConfig(train=str(tmp_path), resize=16), seed=0)
    assert isinstance(examples, SlideExamples) and examples.table.classes == ("ants", "bees")
    (step,) = Feed(examples, 4, training=False).epoch(0)
    assert step[0].inputs.shape == (4, 3, 16, 16) and step[0].targets.tolist() == [0, 0, 1, 1]
    assert step[0].inputs[2, 0, 3, 3] == pytest.approx(100 / 255)


def test_images_of_two_sizes_make_no_batch(tmp_path: Path) -> None:
    for i in range(2):
        np.save(tmp_path / f"{i}.npy", np.zeros((3, 8, 8 + i), np.uint8))
    (tmp_path / "t.csv").write_text("path,label\n0.npy,0\n1.npy,1\n")
    examples, _ = find_tables(DataConfig(train=str(tmp_path / "t.csv")), seed=0)
    with pytest.raises(DataError, match=r"0\.npy.*images of one shape.*--batch 1"):
        list(Feed(examples, 2).epoch(0))


def test_what_is_not_a_pair_is_named() -> None:
    with pytest.raises(DataError, match=r"dataset\[0\] is a int"):
        list(Feed(OwnExamples([1, 2]), 1, training=False).epoch(0))
