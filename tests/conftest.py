"""What holds for every test: the same random numbers, one thread, nothing left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that leaks a thread, an environment variable or a default device fails itself, not its neighbours."""
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    changed = {k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)}
    allowed = {"PYTEST_CURRENT_TEST"}
    assert not {k for k in changed - allowed if not k.startswith(("TORCH", "KMP_", "TRITON", "PYTORCH", "TF_"))}, (
        changed
    )
    leaked = [t for t in set(threading.enumerate()) - threads if t.is_alive() and not t.daemon]
    assert not leaked, leaked
    assert torch.get_default_device().type == "cpu"
