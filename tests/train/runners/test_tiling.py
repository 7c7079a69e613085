"""Tiles of a run: planned in its precision, kept for its continuation, counted without the glass."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from outcore.data import Batch, Scene, open_slide, write_slide, write_slides
from outcore.graph import Graph, capture
from outcore.job import Job
from outcore.program.plan.document import Plan
from outcore.stream.plan.plan import StreamPlan, plan_by_hand
from outcore.train.runners import tiling
from outcore.train.settings.config import Config
from outcore.train.start import forecast
from tests.train.running import run, same, weights

JOB = """
import torch
from outcore.models import SlideNet

def model():
    return SlideNet()

def batch(size):
    return torch.rand(size, 3, 512, 512), torch.randint(2, (size,))
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    write_slides(tmp_path / "slides", 2, size=(512, 512), tile=64)
    return tmp_path / "job.py"


def test_the_share_of_tiles_that_are_not_glass_is_that_of_the_pixels(tmp_path: Path) -> None:
    scene = Scene((2048, 2048), share=0.2, tile=64)
    slide = open_slide(write_slide(tmp_path / "slide.tif", scene))
    whole = slide.read([(0, 3), (0, 2048), (0, 2048)])
    tiles = whole.unfold(1, 128, 128).unfold(2, 128, 128).reshape(3, 256, -1)
    drawn = (tiles.amin(2) != tiles.amax(2)).any(0).reshape(16, 16)
    place = [0, *[1] * 14, 2]
    glass = {(place[row], place[column]) for row, column in (~drawn).nonzero().tolist()}  # in the middle, at edges
    found = tiling.computed_share(Batch((slide.at(level=0),)), *_tiles_of(2048, 128)) * 256
    assert 0 < drawn.sum() < 200
    assert abs(found - int(drawn.sum()) - len(glass)) <= 4  # at the edge of tissue a coarse pixel may be that of either


def _tiles_of(side: int, tile: int) -> tuple[Graph, StreamPlan]:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    graph = capture(net, [(1, 3, side, side)])
    return graph, plan_by_hand(graph, {"tile": [tile, tile]})


def test_what_is_not_a_slide_with_levels_is_computed_whole() -> None:
    assert tiling.computed_share(torch.zeros(1, 3, 64, 64), *_tiles_of(64, 16)) == 1.0


def test_a_forecast_is_made_in_the_precision_of_the_run(job: Path) -> None:
    found = {}
    for precision in ("fp32", "bf16"):
        config = Config.read({"job": str(job)}, [f"train.precision={precision}", "train.device=cpu"])
        found[precision] = forecast(Job.load(str(job)), torch.empty(1, 3, 512, 512), config)
    half, single = found["bf16"], found["fp32"]
    assert half.graph is not None and {v.dtype for v in half.graph.values.values()} >= {"bfloat16"}
    assert half.peak_bytes is not None and single.peak_bytes is not None
    assert half.peak_bytes < single.peak_bytes


def test_a_plan_counts_the_optimizer_that_is_used_and_the_tiles_of_glass(job: Path, tmp_path: Path) -> None:
    found = {}
    for name, share in (("SGD", 1.0), ("Adam", 1.0), ("Adam", 0.0)):
        words = (f"optimizer.name={name}", "optimizer.lr=0.1", "train.device=cpu")
        config, made = Config.read({"job": str(job)}, words), Job.load(str(job))
        inputs, net = torch.empty(1, 3, 512, 512), made.build().train()
        with mock.patch.object(tiling, "computed_share", return_value=share):
            plan = tiling.plan_stream(net, made, config, forecast(made, inputs, config), inputs, 1 << 30)
        assert plan.predicted is not None
        found[name, share] = plan.predicted
    weights = sum(4 * p.numel() for p in net.parameters())
    assert found["Adam", 1.0].peak_bytes[0] - found["SGD", 1.0].peak_bytes[0] == pytest.approx(2 * weights, rel=0.01)
    assert 0 < found["Adam", 0.0].time_s < found["Adam", 1.0].time_s


def test_a_run_that_goes_on_takes_the_tiles_it_had(job: Path, tmp_path: Path) -> None:
    words = (f"data.train={tmp_path}/slides/slides.csv", "plan.memory=6MiB")
    assert run(job, tmp_path / "straight", *words, "train.epochs=2")[0] == 0
    assert run(job, tmp_path / "run", *words, "train.epochs=1")[0] == 0
    with mock.patch.object(tiling, "fit_one_device", side_effect=AssertionError("planned again")):
        code, said = run(job, tmp_path / "run", *words, "train.epochs=2")
    assert code == 0 and "\nstreamed " in said
    assert same(weights(tmp_path / "run"), weights(tmp_path / "straight"))


def test_tiles_written_by_hand_are_a_plan(job: Path, tmp_path: Path) -> None:
    Plan("0" * 16, (("",),), stream={"boundary": None, "tile": [256, 256]}).save(tmp_path / "plan.json")
    words = (f"data.train={tmp_path}/slides/slides.csv", f"plan.file={tmp_path}/plan.json")
    code, said = run(job, tmp_path / "run", *words)
    assert code == 0 and "by the plan that was given" in said


def test_with_channels_last_as_on_a_gpu_a_run_goes_on_bitwise(job: Path, tmp_path: Path) -> None:
    words = (f"data.train={tmp_path / 'slides' / 'slides.csv'}", "plan.tile=256")
    with mock.patch.object(tiling, "arranged", lambda model: model.to(memory_format=torch.channels_last)):
        run(job, tmp_path / "run", *words, "train.epochs=1")
        run(job, tmp_path / "run", *words, "train.epochs=2")
        run(job, tmp_path / "straight", *words, "train.epochs=2")
    run(job, tmp_path / "plain", *words, "train.epochs=2")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "straight"))
    for name, tensor in weights(tmp_path / "plain").items():
        torch.testing.assert_close(tensor, weights(tmp_path / "run")[name], rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_weights_of_images_have_their_channels_last() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten()).cuda()
    assert tiling.arranged(net) is net
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
