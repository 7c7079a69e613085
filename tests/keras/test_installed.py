"""Without the extra: nothing of Keras is imported, and what needs it says how to install it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import outcore.keras
from outcore.errors import ModelError
from outcore.keras.installed import settle_triton


def test_importing_outcore_does_not_import_keras() -> None:
    code = "import sys, outcore.job, outcore.keras; print([m for m in ('keras', 'tensorflow') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_missing_extra_is_answered_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(ModelError, match=r"pip install 'outcore\[keras\]'"):
        outcore.keras.require_keras()


def test_triton_is_kept_out_of_a_process_that_has_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", sys)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    settle_triton()
    blocked = sys.modules.pop("triton")
    assert blocked is None
