"""What a piece of work held at its peak on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from outcore.compiled.measured_peak import measured_peak


def test_what_is_freed_in_between_does_not_count() -> None:
    def run() -> None:
        first = torch.ones(1 << 16)
        del first
        torch.ones(1 << 15)

    assert (1 << 18) <= measured_peak(run, torch.device("cpu")) < (1 << 18) + (1 << 16)


def test_nothing_is_printed_and_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the profiler looks at its level of logs once."""
    code = (
        "import os, torch; from outcore.compiled.measured_peak import measured_peak; "
        "measured_peak(lambda: torch.ones(9), torch.device('cpu')); print('KINETO_LOG_LEVEL' in os.environ)"
    )
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout.strip(), ran.stderr) == ("False", "")
    monkeypatch.setenv("KINETO_LOG_LEVEL", "3")
    measured_peak(lambda: torch.ones(9), torch.device("cpu"))
    assert os.environ["KINETO_LOG_LEVEL"] == "3"
