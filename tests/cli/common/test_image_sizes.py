"""Image sizes are multiples that the network takes, and what was measured is what larger sizes are predicted from."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from outcore.cli.common.image_sizes import multiple_of, scale_images
from outcore.cli.common.messages import Interruption
from outcore.cli.profile import from_measured
from outcore.cost.predicted.scaling import Scaling, SizePoint
from outcore.cost.profile import profile
from outcore.job import Job
from outcore.machine import parse
from tests.cli.command import outcore_command

STRICT = """
import torch
from torch import nn

class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 4, stride=4), nn.ConvTranspose2d(4, 3, 4, stride=4)

    def forward(self, x):
        return x + self.up(self.down(x))

def model():
    return Halves()

def batch(size):
    return torch.rand(size, 3, 64, 64), torch.rand(size, 3, 64, 64)

def loss(output, target):
    return nn.functional.mse_loss(output, target)
"""


def test_sizes_are_multiples_that_the_network_takes(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(STRICT)
    job = Job.load(str(tmp_path / "job.py"))
    assert multiple_of(job, 1, 64) == 4
    shown = outcore_command("profile", "job.py", "--on", "t4", "--image", "61,127", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "multiples of 4: 60, 128" in shown.stderr and "Error" not in shown.stdout
    free = Job(model=lambda: nn.Conv2d(3, 4, 3), batch=lambda n: (torch.rand(n, 3, 32, 32), None))
    assert multiple_of(free, 1, 32) == 1


def test_a_size_that_is_too_small_is_explained_and_the_search_goes_on(tmp_path: Path) -> None:
    pools = "nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.MaxPool2d(2))"
    body = f"import torch\nfrom torch import nn\n\ndef model():\n    return {pools}\n"
    (tmp_path / "job.py").write_text(f"{body}\ndef batch(size):\n    return torch.rand(size, 3, 16, 16), None\n")
    words = ["--on", "t4", "--image", "64,3", "--svg", "a.svg"]
    shown = outcore_command("profile", "job.py", *words, folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    row, said = (line for line in lines if line.split()[:1] == ["3"] or line.startswith("image 3: "))
    assert "Error" not in row and "too small" in shown.stdout[shown.stdout.index(said) :]
    largest = next(line for line in lines if "largest that fits" in line)
    assert int(largest.split()[0]) > 64


def test_points_are_at_the_sides_that_were_asked_for_as_multiples() -> None:
    job = Job(model=lambda: nn.Conv2d(3, 4, 3), batch=lambda n: (torch.rand(n, 3, 32, 32), None))
    found = scale_images(job, parse("t4").devices[0], (61, 127), 1, 4)
    sides = [point.size for point in found.points]
    assert {60, 128} <= set(sides) and all(side % 4 == 0 for side in sides)
    for point in found.points:
        assert point.peak_bytes >= 4 * (3 * point.size**2 + 4 * (point.size - 2) ** 2)
    assert found.largest % 4 == 0 and found.largest >= 128


def test_what_was_measured_corrects_the_sizes_that_were_not() -> None:
    job = Job(model=lambda: nn.Conv2d(3, 4, 3), batch=lambda n: (torch.rand(n, 3, 32, 32), None))
    measured = profile(job, parse("v100").devices[0], size=2)
    took = measured.step.step_s
    points = tuple(SizePoint(n, n * took / 4, n * took / 5, n * took / 3, 100 * n, n) for n in (1, 2, 64))
    found = from_measured(Scaling("batch", points, 10_000, 64, {}), {2: measured})
    assert found.points[1].step_s == found.points[1].measured_s == took
    assert found.points[2].step_s == pytest.approx(32 * took) and found.points[2].measured_s is None
    assert found.points[2].per_second == pytest.approx(64 / (32 * took))


def test_an_interruption_is_raised_where_it_is_safe() -> None:
    with pytest.raises(KeyboardInterrupt), Interruption() as interruption:
        interruption.check()
        signal.raise_signal(signal.SIGINT)  # in the middle of a kernel
        assert interruption.came
        interruption.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_file_is_named_when_it_is_written(tmp_path: Path) -> None:
    network = ["outcore.models:LeNet", "-i", "4x3x32x32"]
    for arguments, files in (
        (["profile", *network, "--on", "t4", "--svg", "p.svg", "-o", "p.json"], ["p.svg", "p.json"]),
        (["plan", *network, "--machine", "v100x2", "-o", "plan.json"], ["plan.json"]),
        (["plan", *network, "--machine", "v100", "-o", "one.json", "--svg", "f.svg"], ["one.json", "f.svg"]),
        (["simulate", network[0], "plan.json", *network[1:], "--machine", "v100x2", "--svg", "t.svg"], ["t.svg"]),
        (["graph", *network, "--svg", "g.svg"], ["g.svg"]),
        (["machine", "--on", "v100", "-o", "m.json"], ["m.json"]),
    ):
        shown = outcore_command(*arguments, folder=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert [f"wrote {name}" in shown.stderr.splitlines() for name in files] == [True] * len(files), shown.stderr
        assert all((tmp_path / name).is_file() for name in files)
