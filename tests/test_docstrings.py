"""Every module can be imported, and every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore

MODULES = sorted(
    name for _, name, _ in pkgutil.walk_packages(outcore.__path__, "outcore.") if not name.endswith("__main__")
)


def with_examples() -> list[str]:
    """The modules whose text has a prompt in it; others are not asked for examples one by one."""
    found = []
    for name in MODULES:
        path = Path(outcore.__path__[0], *name.split(".")[1:])
        source = path.with_suffix(".py")
        if ">>> " in (source if source.exists() else path / "__init__.py").read_text():
            found.append(name)
    return found


def examples(name: str) -> list[doctest.DocTest]:
    """The docstrings of a module that have an example."""
    given: dict[str, Any] = {"torch": torch}
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name), extraglobs=given)
    return [test for test in found if test.examples]


def test_every_module_can_be_imported() -> None:
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise


@pytest.mark.parametrize("name", with_examples())
def test_examples(name: str) -> None:
    tests = examples(name)
    assert tests, "there is a prompt, but in no docstring that a reader would find"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test)
    assert runner.failures == 0
    if not runner.tries:
        pytest.skip("all of its examples need a CUDA device")
