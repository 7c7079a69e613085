"""Without the extra: nothing of Keras is imported, and what needs it says how to install it."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import outcore.keras
from outcore.errors import ModelError
from outcore.keras.installed import repeatable
from outcore.load_order import settle_triton


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


def test_triton_is_loaded_when_tensorflow_is_about_to_be(tmp_path: Path) -> None:
    """Empty packages in their places: the order is outcore's, and the real ones take long to load."""
    for name in ("triton", "tensorflow"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    code = "import outcore, sys; before = 'triton' in sys.modules; import tensorflow; print(before, list(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment).stdout
    assert shown.startswith("False") and shown.index("'triton'") < shown.index("'tensorflow'")


@pytest.mark.slow
def test_triton_is_loaded_before_tensorflow() -> None:
    code = (
        "import outcore, sys; import tensorflow; "
        "found = [name for name in sys.modules if name in ('triton', 'tensorflow')]; "
        "import torch; torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1); print(found)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert shown.returncode == 0, shown.stderr[-2000:]
    has_triton = importlib.util.find_spec("triton") is not None
    assert shown.stdout.split("\n")[-2] == str(["triton", "tensorflow"] if has_triton else ["tensorflow"])


def test_a_repeatable_part_begins_anew_every_time_and_leaves_no_trace() -> None:
    import keras

    def number(name: str) -> int:
        return int(name.rpartition("_")[2]) if "_" in name else 0

    before = number(keras.layers.Dense(1).name)
    state = random.getstate()
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        with repeatable():
            names = [keras.layers.Dense(1).name for _ in range(2)]
            assert names == ["dense", "dense_1"]
            drawn.append((random.random(), float(keras.random.normal((), seed=keras.random.SeedGenerator()))))
    assert drawn[0] == drawn[1] != drawn[2]
    assert random.getstate() == state and number(keras.layers.Dense(1).name) == before + 1
    state = random.getstate()
    with pytest.raises(ZeroDivisionError), repeatable():
        keras.layers.Dense(1)
        raise ZeroDivisionError
    assert random.getstate() == state and number(keras.layers.Dense(1).name) == before + 2
