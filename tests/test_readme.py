"""The README: its first snippet runs as printed, it is short, and what it names is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_first_snippet_runs_as_printed(tmp_path: Path) -> None:
    first = re.search(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert first is not None and "outcore.within(" in first[1]
    whole = first[1] + "\nprint(sum(p.grad is not None for p in model.parameters()), len(list(model.parameters())))\n"
    done = subprocess.run([sys.executable, "-c", whole], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trained, parameters = done.stdout.splitlines()[-1].split()
    assert trained == parameters and "of plain" in done.stdout + done.stderr


def test_it_is_short_with_one_picture_and_a_dozen_claims() -> None:
    assert len(README.splitlines()) < 120
    assert len(re.findall(r"^!\[.+\]\(docs/pictures/\S+\)$", README, re.MULTILINE)) == 1
    measured = README.split("## Measured")[1].split("\n## ")[0]
    claims = [line for line in measured.splitlines() if line.startswith("- ")]
    assert 6 <= len(claims) <= 12
    assert all(re.search(r"\((?:\[[\w-]+\]\(\S+\)(?:, )?)+\)$", claim) for claim in claims)


def test_every_file_that_is_named_is_there() -> None:
    for page in ("README.md", "docs/measured.md", "docs/index.md"):
        path = ROOT / page
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), (page, target)
