"""A step that is really run: its calls have the names of the graph, its peak is predicted, plans are followed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outcore.cost.profile import profile
from outcore.errors import OutcoreError
from outcore.explore.measured_step import check_room, measured_step
from outcore.explore.plan_points import PlanTable
from outcore.explore.resized_job import resized_job
from outcore.job import Job
from outcore.machine import known, parse
from tests.explore.jobs import write
from tests.foreign.shim import define_torchvision_operators

CPU = torch.device("cpu")

RESNET = """\
import torch, torchvision

size = 2

def model():
    return torchvision.models.resnet18()

def batch(size):
    return torch.randn(size, 3, 64, 64), torch.randint(1000, (size,))

def loss(output, target):
    return torch.nn.functional.cross_entropy(output, target)

def optimizer(params):
    return torch.optim.Adam(params)
"""

UNET = """\
import torch
from monai.networks.nets import UNet

size = 1

def model():
    return UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=2)

def batch(size):
    return torch.randn(size, 1, 16, 16, 16), torch.randint(2, (size, 16, 16, 16))

def loss(output, target):
    return torch.nn.functional.cross_entropy(output, target)

def optimizer(params):
    return torch.optim.Adam(params)
"""

BERT = """\
import torch
from transformers import BertConfig, BertForSequenceClassification

size = 2

def model():
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100)
    return BertForSequenceClassification(BertConfig(**small))

def batch(size):
    return torch.randint(100, (size, 16)), torch.randint(2, (size,))

def loss(output, target):
    return torch.nn.functional.cross_entropy(output.logits, target)

def optimizer(params):
    return torch.optim.Adam(params)
"""


def names(found: dict, kind: str) -> list[str]:  # type: ignore[type-arg]
    return [event[3] for event in found["events"] if found["kinds"][event[2]] == kind]


def test_every_call_is_recorded_under_its_name_and_the_peak_is_the_predicted_one(tmp_path: Path) -> None:
    job = Job.load(str(write(tmp_path)))
    shown = profile(job, parse("v100").devices[0])
    found = measured_step(job, None, None, CPU)
    assert names(found, "forward") == list(shown.graph.calls)
    backward = names(found, "backward")
    assert backward[0] == "loss" and backward[1:] == list(reversed(shown.graph.calls))
    assert names(found, "step") == ["optimizer"] and found["alone_s"] > 0
    ends = [event[4] + event[5] for event in found["events"]]
    assert all(end <= event[4] + 0.1 for end, event in zip(ends, found["events"][1:], strict=False))
    [memory] = found["memory"]
    assert memory["peak_bytes"] == pytest.approx(shown.memory.peak_bytes, rel=0.1)
    assert max(memory["bytes"]) == memory["peak_bytes"] and len(memory["bytes"]) == len(memory["times_us"])


@pytest.mark.slow
def test_a_step_by_a_plan_recomputes_and_holds_less(tmp_path: Path) -> None:
    job = Job.load(str(write(tmp_path)))
    where = parse("v100")
    table = PlanTable.of(job, profile(job, where.devices[0]), where)
    made = table.by_hand({}, {"first": "recompute", "second": "recompute"})
    plain, planned = measured_step(job, None, None, CPU), measured_step(job, None, table.document(made), CPU)
    assert planned["planned"] and not plain["planned"]
    assert names(planned, "forward") == names(plain, "forward")
    assert planned["memory"][0]["peak_bytes"] < 0.95 * plain["memory"][0]["peak_bytes"]


def test_a_job_of_another_image_size_keeps_its_numbers(tmp_path: Path) -> None:
    job = Job.load(str(write(tmp_path)))
    images, labels = resized_job(job, 96).batch(2)
    assert images.shape == (2, 3, 96, 96) and labels.shape == (2, 96, 96) and labels.dtype == torch.int64
    assert set(labels.unique().tolist()) <= {0, 1}
    assert resized_job(job, 32).capture(2).values["image"].shape == (2, 3, 32, 32)
    words = Job(lambda: torch.nn.Linear(4, 2), lambda size: (torch.randn(size, 4), None))
    with pytest.raises(OutcoreError, match="no input has the shape of an image"):
        resized_job(words, 32).batch(1)


def test_a_step_that_does_not_fit_here_is_refused_before_it_is_run() -> None:
    with pytest.raises(OutcoreError, match="choose a smaller batch or image, or a plan"):
        check_room(1 << 60, CPU)
    check_room(1 << 10, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("text", [RESNET, UNET, BERT], ids=["resnet18", "monai unet", "bert"])
def test_calls_of_foreign_models_have_the_graph_s_names(tmp_path: Path, text: str) -> None:
    define_torchvision_operators()
    job = Job.load(str(write(tmp_path, text)))
    shown = profile(job, parse("v100").devices[0])
    found = measured_step(job, None, None, CPU)
    assert names(found, "forward") == list(shown.graph.calls)
    assert set(names(found, "backward")) - {"loss"} <= set(shown.graph.calls)
    assert found["memory"][0]["peak_bytes"] == pytest.approx(shown.memory.peak_bytes, rel=0.15)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_a_gpu_is_recorded_by_the_device_s_own_clock(tmp_path: Path) -> None:
    define_torchvision_operators()
    text = RESNET.replace("resnet18", "resnet50").replace("size = 2", "size = 64").replace("64, 64", "224, 224")
    job = Job.load(str(write(tmp_path, text)))
    found = measured_step(job, None, None, torch.device("cuda"))
    shown = profile(job, known().devices[0])
    assert names(found, "forward") == list(shown.graph.calls)
    busy = sum(event[5] for event in found["events"]) / 1e6
    assert 0.5 * found["step_s"] < busy <= found["step_s"] * 1.001
    print(f"predicted {shown.step.step_s * 1e3:.1f} ms, {shown.memory.peak_bytes / 2**30:.2f} GiB")
    print(f"measured {found['alone_s'] * 1e3:.1f} ms, {found['memory'][0]['peak_bytes'] / 2**30:.2f} GiB", end=" ")
    print(f"({found['step_s'] * 1e3:.1f} ms while it was recorded)")
    assert found["memory"][0]["peak_bytes"] == pytest.approx(shown.memory.peak_bytes, rel=0.25)
