"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import outcore

MODULES = sorted(
    name for _, name, _ in pkgutil.walk_packages(outcore.__path__, "outcore.") if not name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name.startswith("outcore.kernels."):
        pytest.importorskip("triton")
    module = importlib.import_module(name)
    found = doctest.DocTestFinder(exclude_empty=True).find(
        module, extraglobs={"torch": importlib.import_module("torch")}
    )
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for example in found:
        runner.run(example)
    assert runner.failures == 0
