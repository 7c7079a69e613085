"""`outcore profile` as typed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import outcore
from outcore.cli.profile import from_measured
from outcore.cost.profile import profile, scale
from outcore.machine import parse
from tests.cli.command import outcore_command
from tests.cli.test_graph import UNET


def test_a_network_that_fits_no_device_is_profiled_block_by_block() -> None:
    network = ["outcore.models:UNet", "--input", "1x3x100000x100000", "--on", "h200"]
    shown = outcore_command("profile", *network)
    assert shown.returncode == 0, shown.stderr
    assert "does not fit" in shown.stdout
    words = " ".join(shown.stdout.split())
    assert "larger than the device on their own: encoder1 (6 of 6 calls), encoder2 (7 of 7 calls), " in words


def test_several_batch_sizes_and_the_largest_that_fits() -> None:
    shown = outcore_command("profile", *UNET, "--on", "t4", "--batch", "1,2", "--json")
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout)
    one, two = document["profiles"]
    assert (one["batch"], two["batch"]) == (1, 2)
    assert one["peak_bytes"] < two["peak_bytes"]
    assert document["largest_batch"] > 100


def test_what_was_measured_corrects_what_is_predicted_for_other_sizes() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
    job = outcore.Job(model=lambda: net, batch=lambda n: (torch.rand(n, 3, 64, 64), None), size=1)
    device = parse("t4").devices[0]
    found, small = scale(job, device, sizes=(1, 2, 8), limit=8), profile(job, device, size=2)
    step = replace(small.step, wait_s=small.step.wait_s + 2 * small.step.step_s)  # three times as long as predicted
    made = {p.size: p for p in from_measured(found, {2: replace(small, step=step)}).points}
    assert made[2].measured_s == made[2].step_s == pytest.approx(3 * small.step.step_s)
    for before in found.points:
        assert made[before.size].step_s == pytest.approx(3 * before.step_s)
        assert made[before.size].peak_bytes == before.peak_bytes


def test_image_sizes_are_predicted_and_the_last_is_drawn(tmp_path: Path) -> None:
    shown = outcore_command("profile", *UNET, "--on", "t4", "--image", "64,128", "--json")
    assert shown.returncode == 0, shown.stderr
    scaling = json.loads(shown.stdout)["scaling"]
    small, large = scaling["points"][:2]
    assert (small["size"], large["size"], scaling["along"]) == (64, 128, "image")
    assert small["low_s"] <= small["step_s"] <= small["high_s"]
    assert scaling["largest"] >= 128
    picture = tmp_path / "profile.svg"
    texts = []
    for sizes in ((), ("--image", "64"), ("--image", "64,128"), ("--image", "128")):
        drawn = outcore_command("profile", *UNET, "--on", "t4", *sizes, "--svg", "profile.svg", folder=tmp_path)
        assert drawn.returncode == 0 and drawn.stderr.endswith("wrote profile.svg\n"), drawn.stderr
        texts.append(picture.read_text())
        picture.unlink()
    assert texts[0].startswith("<svg") and texts[1] != texts[2] == texts[3]  # the last of the sizes


def test_wrong_use_says_why() -> None:
    for arguments, message in (
        (["--on", "h2000"], "h200"),
        (["--on", "h200", "--measure"], "cannot be measured from here"),
        (["--batch", "x"], "numbers like 1,2,4"),
        (["--batch", "1,2", "--image", "64"], "several batch sizes"),
    ):
        shown = outcore_command("profile", *UNET, *arguments)
        assert shown.returncode != 0
        assert message in shown.stderr.replace("\n", " ").replace("│", "")
        assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("command", ["profile", "verify", "explore"])
@pytest.mark.parametrize("side", [2**40, 10**25])
def test_an_image_that_no_tensor_can_hold_is_refused(command: str, side: int, tmp_path: Path) -> None:
    options = {"profile": ["--on", "t4"], "verify": [], "explore": ["--export", "page.html", "--seconds", "0"]}[command]
    shown = outcore_command(command, *UNET, *options, "--image", str(side), folder=tmp_path)
    said = " ".join((shown.stdout + shown.stderr).split())
    assert ("Traceback" not in said and "give a smaller --image" in said) or "cannot be cropped to" in said, said
    assert not list(tmp_path.iterdir())


def test_the_frontier_is_a_table_a_picture_and_numbers(tmp_path: Path) -> None:
    network = [*UNET, "--on", "t4", "--frontier"]
    shown = outcore_command("profile", *network, "--svg", "p.svg", "-o", "p.json", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "time against memory" in shown.stdout
    picture = (tmp_path / "p-frontier.svg").read_text()
    assert picture.count("<circle") >= 3 and ">plain training</text>" in picture
    points = json.loads((tmp_path / "p.json").read_text())["frontier"]
    peaks, times = [p["peak_bytes"] for p in points], [p["time_s"] for p in points]
    assert peaks == sorted(peaks, reverse=True) and times == sorted(times) and len(points) > 1
    refused = outcore_command("profile", *network, "--batch", "1,2", folder=tmp_path)
    assert refused.returncode == 2 and "of one size" in " ".join(refused.stderr.split())


def test_whether_a_scan_could_pay() -> None:
    shown = outcore_command("profile", *UNET, "--on", "t4", "--scan")
    assert shown.returncode == 0, shown.stderr
    words = " ".join(shown.stdout.split())
    assert "critical FLOPs by levels of products" in words and "a scan does not pay" in words
    found = json.loads(outcore_command("profile", *UNET, "--on", "t4", "--scan", "--json").stdout)["scan"]
    assert found["pays"] is False and found["verdict"] in words and len(found["links"]) > 1
    refused = outcore_command("profile", *UNET, "--on", "t4", "--scan", "--batch", "1,2")
    assert refused.returncode == 2 and "of one size" in " ".join(refused.stderr.split())
