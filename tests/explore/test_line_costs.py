"""What lines and blocks take is what their calls take, each counted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcore.cost.costs import total
from outcore.cost.profile import Profile, profile
from outcore.explore.block_costs import CATEGORIES, block_rows
from outcore.explore.line_costs import line_costs, source_files
from outcore.job import Job
from outcore.machine import parse
from tests.explore.jobs import SMALL, line_of, write


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    path = write(tmp_path_factory.mktemp("job"))
    return profile(Job.load(str(path)), parse("v100").devices[0])


def test_a_line_has_the_costs_of_all_it_calls(shown: Profile) -> None:
    [(name, lines)] = line_costs(shown.graph, shown.costs).items()
    assert name.endswith("job.py")
    for words, inside in (
        ("self.first(image)", "first."),
        ("self.second(a)", "second."),
        ("torch.cat", ("head", "cat")),
    ):
        calls = [c for n, c in shown.costs.calls.items() if n.startswith(inside)]
        assert lines[line_of(SMALL, words)].totals == total(calls)
    shared = lines[line_of(SMALL, "F.relu(self.norm(self.conv(x)))")]
    assert shared.blocks == tuple(f"{b}.{c}" for b in ("first", "second") for c in ("conv", "norm", "relu()"))


def test_lines_of_one_function_add_up_to_it(shown: Profile) -> None:
    [lines] = line_costs(shown.graph, shown.costs).values()
    top = [lines[line_of(SMALL, words)] for words in ("self.first(image)", "self.second(a)", "torch.cat", "F.cross")]
    assert sum(line.totals.time_s for line in top) == pytest.approx(shown.costs.total().time_s)
    assert sorted(c for line in top for c in line.calls) == sorted(shown.graph.calls)


def test_a_loss_of_torch_shows_no_file_of_ours(tmp_path: Path) -> None:
    """A loss without a file is called from one of ours, which a user did not write and cannot change."""
    own = SMALL.replace(
        "def loss(output, target):\n    return F.cross_entropy(output, target)", "loss = F.cross_entropy"
    )
    assert own != SMALL
    shown = profile(Job.load(str(write(tmp_path, own, "own.py"))), parse("v100").devices[0])
    assert [file.path.name for file in source_files(shown.graph, shown.costs)] == ["own.py"]


def test_the_files_come_with_their_text(shown: Profile) -> None:
    [file] = source_files(shown.graph, shown.costs)
    assert file.text == SMALL and file.path.name == "job.py"


def test_blocks_have_what_costs_say_of_them_and_the_whole_peak(shown: Profile) -> None:
    found = block_rows(shown.graph, shown.costs, shown.memory)
    for path in ("", "first", "second.conv", "head"):
        row, expected = dict(zip(found["columns"], found["rows"][path], strict=True)), shown.costs.total(path)
        assert row["forward_s"] == pytest.approx(expected.forward_s, rel=1e-4)
        assert row["backward_s"] == pytest.approx(expected.backward_s, rel=1e-4)
        assert row["saved_bytes"] == expected.saved_bytes and row["workspace_bytes"] == expected.workspace_bytes
    held = dict(zip(found["columns"], found["rows"][""], strict=True))
    assert sum(held[name] for name in CATEGORIES) == pytest.approx(shown.memory.peak_bytes, rel=1e-4)
