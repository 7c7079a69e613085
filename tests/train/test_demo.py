"""The demo: everything it claims is in its figures."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import outcore_command


def test_the_demo(tmp_path: Path) -> None:
    shown = outcore_command("demo", "--side", "512", "--json", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    figures = json.loads(shown.stdout)
    facts = figures["facts"]
    assert figures["agreement"] < 1e-12
    assert facts["forecast"]["peak_bytes"] > 2 * facts["budget_bytes"] > 2 * facts["measured"]["peak_bytes"]
    assert facts["ended"] == "finished" and (tmp_path / "outcore-demo" / "run" / "report.html").exists()


def test_it_replaces_its_own_folder_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    shown = outcore_command("demo", "--side", "512", "--out", "mine", folder=tmp_path)
    assert shown.returncode == 1 and "is not a folder of the demo" in shown.stderr
    assert (tmp_path / "mine" / "thesis.tex").exists()
