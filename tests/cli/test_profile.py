"""`outcore profile` as typed."""

from __future__ import annotations

import json

from tests.cli.command import outcore_command
from tests.cli.test_graph import UNET


def test_a_network_that_fits_no_device_is_profiled_block_by_block() -> None:
    network = ["outcore.models:UNet", "--input", "1x3x100000x100000", "--on", "h200"]
    shown = outcore_command("profile", *network)
    assert shown.returncode == 0, shown.stderr
    assert "does not fit" in shown.stdout
    assert "larger than the device on their own: encoder1.conv1#0" in " ".join(shown.stdout.split())


def test_several_batch_sizes_and_the_largest_that_fits() -> None:
    shown = outcore_command("profile", *UNET, "--on", "t4", "--batch", "1,2", "--json")
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout)
    one, two = document["profiles"]
    assert (one["batch"], two["batch"]) == (1, 2)
    assert one["peak_bytes"] < two["peak_bytes"]
    assert document["largest_batch"] > 100


def test_wrong_use_says_why() -> None:
    for arguments, message in (
        (["--on", "h2000"], "h200"),
        (["--on", "h200", "--measure"], "cannot be measured from here"),
        (["--batch", "x"], "numbers like 1,2,4"),
    ):
        shown = outcore_command("profile", *UNET, *arguments)
        assert shown.returncode != 0
        assert message in shown.stderr.replace("\n", " ").replace("│", "")
        assert "Traceback" not in shown.stderr
