"""A test that fills a disk leaves nothing behind that breaks the next process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMITED = """
import sys
from tests.file_size_limit import limit_file_size
limit_file_size(600)
sys.path.insert(0, sys.argv[1])
import long
try:
    with open(sys.argv[1] + "/data", "wb") as file:
        file.write(bytes(601))
except OSError:
    print("full")
"""


def test_a_module_that_is_imported_on_a_full_disk_can_be_imported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    (tmp_path / "long.py").write_text("\n".join(f"def f{i}():\n    return {i}" for i in range(200)))
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "full\n"
    again = [sys.executable, "-c", "import long; print(long.f7())"]
    assert subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, check=True).stdout == "7\n"
