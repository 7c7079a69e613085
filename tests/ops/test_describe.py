"""What is known of operations is said in one place, and docs/design/operations.md says it too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from outcore.errors import OutcoreError
from outcore.ops import describe, operations
from tests.ops.named_operations import by_file

NAMED = 49
"""Names of operations in files that hold no rules: this number may only fall."""


def test_the_page_of_operations_is_current() -> None:
    script = Path(__file__).parents[2] / "docs" / "make_operations.py"
    spec = importlib.util.spec_from_file_location("make_operations", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python docs/make_operations.py"


def test_an_operation_is_described_under_each_of_its_names() -> None:
    for op in operations():
        assert {describe(type_).operation.name for type_ in op.types} == {op.name}
    known = str(describe("MaxPool2d"))
    assert "max_pool2d (max pool), recorded as MaxPool2d, max_pool2d" in known
    assert all(word in known for word in ("window", "stream.rules.unpool", "fusion.rules.modules", "indices"))
    with pytest.raises(OutcoreError, match="catalogue"):
        describe("SomethingElse")


def test_files_without_rules_name_few_operations() -> None:
    found = by_file()
    assert sum(map(len, found.values())) <= NAMED, found
