"""The README's list of claims is what stored results give; figures count every row and name the worst."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from benchmarks.claims import figures
from benchmarks.claims.__main__ import BEGIN, END, STORED, alike, listed, written
from benchmarks.claims.registry import CLAIMS, ROOT, Claim


def test_the_list_in_the_readme_is_made_from_what_is_stored() -> None:
    stored = json.loads(STORED.read_text())
    readme = (ROOT / "README.md").read_text()
    assert written(readme, listed(stored)) == readme, "run: python -m benchmarks.claims --write README.md"
    paths = {path.relative_to(ROOT).as_posix(): path for claim in CLAIMS for path in claim.paths}
    assert set(stored) == set(paths)
    for name, path in paths.items():
        assert stored[name]["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()[:16], name


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.benchmark)
def test_every_claim_can_be_measured_again_or_says_why_not(claim: Claim) -> None:
    assert (claim.rerun is None) == bool(claim.why_not)
    if claim.rerun is not None:
        script, *_ = [part for part in claim.rerun.command if part.endswith(".py")] or [
            "benchmarks/frontier/__main__.py"
        ]
        assert (ROOT / script).exists()


def test_todays_rows_are_set_beside_the_same_stored_ones(tmp_path: Path) -> None:
    claim = next(claim for claim in CLAIMS if claim.benchmark == "zoo-capture")
    today = tmp_path / "zoo.json"
    today.write_text(json.dumps({"rows": [{"model": "torchvision/alexnet"}, {"model": "of today alone"}]}))
    (stored,) = alike(claim, [today])
    assert [row["model"] for row in stored["rows"]] == ["torchvision/alexnet"]
    assert claim.figures([stored])["models"] == 1


def test_markers_that_are_missing_are_named() -> None:
    with pytest.raises(SystemExit, match="no markers"):
        written("a page without them", "- claim")
    assert written(f"a {BEGIN} old {END} b", "- new") == f"a {BEGIN}\n- new\n{END} b"


def test_a_network_counts_by_its_newest_run_and_failures_are_named() -> None:
    row = {"reserved": 9, "budget": 10, "retries": 0, "refused": 0, "bitwise": 2, "gradients": 2}
    old = {"rows": [{"network": "a 1", "ratio": 9.0, **row}, {"network": "b 1", "ratio": 1.5, **row}]}
    new = {
        "rows": [{"network": "a 1", "ratio": 1.0, **row, "retries": 3}, {"network": "c 1", "error": "out of memory"}]
    }
    found = figures.by_default([old, new])
    assert (found["networks"], found["done"], found["slowest"], found["held"]) == (3, 2, 1.5, 1)
    assert (found["failed"], found["slow"]) == ("c", "b 1.50x")


def test_ours_is_level_with_compile_only_where_it_takes_no_more_memory_in_any_step() -> None:
    def row(way: str, ms: float, reserved: int, first: int) -> dict[str, object]:
        return {"case": "n", "way": way, "ms": ms, "reserved": reserved, "first_reserved": first, "budget": 60}

    plain, peer = row("plain last", 100, 100, 100), row("compile 0.5", 90, 60, 80)
    small = figures.frontier([[plain, peer, row("ours 1/2", 90, 50, 60)]])
    assert (small["ahead"], small["within"], small["half"]) == (1, 1, 0.9)
    large_at_first = figures.frontier([[plain, peer, row("ours 1/2", 90, 50, 70)]])
    assert (large_at_first["ahead"], large_at_first["within"]) == (0, 0)


def test_plain_training_is_the_largest_of_any_run() -> None:
    rows = [{"limit": "11GiB", "grows": "image", "how": "plain", "size": n} for n in (2496, 2560)]
    assert figures.largest([{"rows": rows[:1]}, {"rows": rows[1:]}])["image_plain"] == 2560
