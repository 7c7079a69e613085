"""An engine that is given no plan on several ranks makes one; the how-to's lines run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.foreign.sample import sometimes

ROOT = Path(__file__).parents[3]


@sometimes
def test_the_lines_of_the_how_to_run_on_two_ranks(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/split.md").read_text()
    lines = next(
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Engine(job, optimizer" in text
    )
    told = "print(engine.plan.arrangement, engine.samples)\nengine.close()"
    (tmp_path / "train.py").write_text(lines.replace("engine.close()", told))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    shown = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("data parallel, 2 replicas") == 2 and shown.stdout.count(" 16") == 2  # lines may mix


def test_a_model_without_an_example_says_what_to_pass() -> None:
    from torch import nn

    from outcore.errors import EngineError
    from outcore.run.engine.default_plan import _plan

    with pytest.raises(EngineError, match="pass example=inputs"):
        _plan(2, nn.Linear(2, 2), None)
