"""The frontier: every peer trains as plain PyTorch does; budgets come from the faster plain; one has the device."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frontier import peers
from benchmarks.frontier.__main__ import Table
from benchmarks.frontier.row import Settings, measure
from benchmarks.frontier.training import Case, alike
from benchmarks.frontier.turns import Asked, Turn, run_all
from benchmarks.frontier.ways import Ready, ways
from tests.benchmarks.holding import hold

UNET = Case("unet", "tiny", False)
PEERS = ("checkpoint coarse", "checkpoint fine", "selective coarse", "save_on_cpu", "offload 1.0", "offload 0.5")
NETWORKS = ("resnet50", "gpt", "vit_b_16", "densenet121", "unet3d", "swin_t", "bert", "mobilenet_v3")


@pytest.mark.parametrize("way", PEERS)
def test_every_peer_trains_as_plain_training_does(way: str) -> None:
    plain, training = UNET.fresh("cpu", False), UNET.fresh("cpu", False)
    state = plain.state()
    peers.apply(UNET, way, training)
    for _ in range(2):
        training.step()
    found = alike(training.gradients(state), plain.gradients(state))
    assert found["bitwise"] == found["gradients"] == 36


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("way", PEERS)
def test_every_peer_trains_every_network_as_plain_training_does(name: str, way: str) -> None:
    case = Case(name, "tiny", False)
    plain, training = case.fresh("cpu", False), case.fresh("cpu", False)
    state = list(plain.state().values())
    peers.apply(case, way, training)
    training.step()
    found, want = (one.gradients(dict(zip(one.model.state_dict(), state, strict=True))) for one in (training, plain))
    assert alike(found, want)["bitwise"] == len(want)


def test_a_row_has_times_peaks_and_gradients(tmp_path: Path) -> None:
    asked: list[str] = []
    row = measure(UNET, "offload 1.0", True, None, Settings("cpu", 10, folder=tmp_path), Turn(asked.append))
    assert row["steps"] == 10 and row["quarter_ms"] <= row["ms"] <= row["three_quarters_ms"]
    assert row["first_reserved"] > 0 and row["bitwise"] == row["gradients"] == row["plain_repeats"]
    assert asked == ["alone", "quiet", "loud", "free"]


def test_what_goes_wrong_is_in_the_row(tmp_path: Path) -> None:
    row = measure(UNET, "no such way", False, None, Settings("cpu", folder=tmp_path), Turn(lambda what: None))
    assert row["error"].startswith("ValueError") and "ms" not in row


def test_budgets_are_shares_of_the_faster_plain_and_wait_for_it() -> None:
    half = next(way for way in ways("a") if way.name == "ours 1/2")
    first = {"way": "plain first", "ms": 2.0, "reserved": 100, "channels_last": False}
    last = {"way": "plain last", "ms": 1.0, "reserved": 60, "channels_last": True}
    assert half.ready({"plain first": first}, True) is None
    assert half.ready({"plain first": first, "plain last": last}, True) == Ready(True, 30)
    of_compile = next(way for way in ways("b") if way.name == "ours compile 1/2 of compile")
    rows: dict[str, Any] = {
        "plain first": first,
        "plain last": last,
        "compile 0.1": {"error": "x", "way": "compile 0.1"},
    }
    assert of_compile.ready(rows, True) == "torch.compile was not measured"
    rows["compile 0.1"] = {"way": "compile 0.1", "ms": 1.0, "reserved": 40, "first_reserved": 90}
    assert of_compile.ready(rows, True) == Ready(True, 20)


def table(folder: Path, **more: Any) -> Table:
    given = {"out": folder, "device": "cpu", "networks": "unet", "precisions": "bf16", "tiers": "a", "ways": []}
    return Table(argparse.Namespace(**given, resume=[], steps=3, **more))


def test_rows_that_are_there_are_not_measured_again_unless_what_they_depend_on_has_changed(tmp_path: Path) -> None:
    first = table(tmp_path)
    asked = first.next()
    assert asked is not None and asked.name == "unet 2x64 bf16 plain first"
    asked.done({"ms": 1.0, "reserved": 10, "quarter_ms": 1.0, "three_quarters_ms": 1.0, "steps": 3, "all_s": 0.1})
    again = table(tmp_path).next()
    assert again is not None and again.name == "unet 2x64 bf16 plain last"
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace(first.fingerprints[False], "another"))
    changed = table(tmp_path).next()
    assert changed is not None and changed.name == "unet 2x64 bf16 plain first"


def test_one_process_at_a_time_has_the_device_and_who_dies_or_hangs_gives_it_back(tmp_path: Path) -> None:
    path, rows = tmp_path / "log", []
    left = ["a", "dies", "hangs", "b", "c"]

    def next_() -> Asked | None:
        return Asked(hold, (str(path), left.pop(0)), rows.append, "") if left else None

    run_all(next_, processes=5, limit_s=3, until=time.monotonic() + 60, settle_s=0.0)
    lines = path.read_text().split("\n")[:-1]
    assert sorted(row["name"] for row in rows if "name" in row) == ["a", "b", "c"]
    assert sorted(row["error"][:8] for row in rows if "error" in row) == ["the proc", "took mor"]
    for name in ("a", "b", "c"):
        assert lines.index(f"{name} ends") == lines.index(f"{name} begins") + 1
