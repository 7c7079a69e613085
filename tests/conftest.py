"""What holds for every test: the same random numbers, one thread, nothing left behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.foreign.sample import drawn

LONG_TESTS = Path(__file__).with_name("long_tests.txt")
"""Tests of more than a second of a core: each is a quick one with one commit in three, all with OUTCORE_LONG=all."""

# torch asks the name server about every address it connects to; one lost question is five seconds otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# What one test measures is none of another's business.
os.environ["OUTCORE_CACHE"] = "off"

# What is started in the background of a shell, or with nohup, ignores these, and so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # The same examples in every run; HYPOTHESIS_SEARCH=1 looks for new ones.
    settings.register_profile("repeated", derandomize=not os.environ.get("HYPOTHESIS_SEARCH"))
    settings.load_profile("repeated")

# What was imported so far stays: the collector need not go through it for every test that asks what is left behind.
gc.collect()
gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Importing hundreds of modules makes nothing that has to be collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a GPU says so where there is none; of the tests that take seconds a third are quick ones."""
    if os.environ.get("OUTCORE_LONG") != "all":
        long = set(LONG_TESTS.read_text(encoding="utf-8").splitlines())
        for item in items:
            if item.nodeid in long and not drawn(item.nodeid, 3):
                item.add_marker(pytest.mark.slow)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_on_the_device(request: pytest.FixtureRequest) -> None:
    """What the test before held is no part of what a GPU reserves in this one."""
    if request.node.get_closest_marker("gpu") is not None:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that leaks a thread, a launcher's variable or a setting of torch's fails itself, not its neighbours."""
    variables, threads, settings = _launcher_variables(), set(threading.enumerate()), _settings_of_torch()
    searched = list(sys.path)
    yield
    sys.path[:] = searched  # the folder of a job's file stays on it
    assert _launcher_variables() == variables
    assert _settings_of_torch() == settings
    leaked = [t for t in set(threading.enumerate()) - threads if t.is_alive() and not t.daemon]
    assert not leaked, leaked
    assert torch.get_default_device().type == "cpu"


def _settings_of_torch() -> dict[str, object]:
    """What a function may change while it runs, and must put back."""
    cudnn = torch.backends.cudnn
    return {
        "deterministic": (torch.are_deterministic_algorithms_enabled(), cudnn.deterministic),
        "search": cudnn.benchmark,
        "products": (torch.get_float32_matmul_precision(), cudnn.allow_tf32),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


def _launcher_variables() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OUTCORE", "CUDA_VISIBLE", "XDG_")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}
