"""The examples run as their READMEs say, at a small size."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.cli.command import outcore_command

EXAMPLES = Path(__file__).parents[3] / "examples"

JOBS = {
    "pathology": (
        ("--side", "256", "--train", "4", "--validation", "2"),
        ("--arg", "depth=11", "--memory", "40MiB", "--epochs", "1"),
        "streamed",
    ),
    "segmentation": (
        ("--side", "128", "--train", "2", "--validation", "1"),
        ("--arg", "width=4", "--arg", "depth=2", "--memory", "4MiB", "--epochs", "1"),
        "within",
    ),
    "cosmology": (
        ("--side", "32", "--train", "4", "--validation", "2"),
        ("--arg", "width=2", "--memory", "1GiB", "--epochs", "1"),
        "budget",
    ),
}


def script(path: Path, *arguments: str) -> None:
    with mock.patch.object(sys, "argv", [str(path), *arguments]):
        runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "pathology" else n for n in JOBS])
def test_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    data, options, how = JOBS[name]
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SIDE", data[1])
    script(folder / "make_data.py", *data)
    shown = outcore_command("train", "run.yaml", "--device", "cpu", *options, folder=folder)
    assert shown.returncode == 0, shown.stderr
    assert f"\n{how} " in shown.stdout
    (run,) = (folder / "runs").iterdir()
    facts = json.loads((run / "run.json").read_text())
    assert facts["ended"] == "finished" and (run / "report.html").exists()
    assert facts["measured"]["peak_bytes"] <= 1.02 * facts["budget_bytes"]


@pytest.mark.slow
def test_image_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "image_folder"
    shutil.copytree(EXAMPLES / "image_folder", folder)
    monkeypatch.chdir(folder)
    script(folder / "make_data.py", "--train", "1", "--val", "1")
    options = ("--device", "cpu", "--epochs", "1", "--batch", "2", "data.resize=64")
    shown = outcore_command("train", "run.yaml", *options, folder=folder)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.slow
def test_warm_up_then_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "pathology"
    shutil.copytree(EXAMPLES / "pathology", folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SIDE", "256")
    script(folder / "make_data.py", "--side", "256", "--train", "4", "--validation", "2")
    first = ("--device", "cpu", "--epochs", "1", "--batch", "2", "data.crop=64", "arguments=[norm=batch, depth=11]")
    shown = outcore_command("train", "warm_up.yaml", *first, folder=folder)
    assert shown.returncode == 0, shown.stderr
    second = ("--device", "cpu", "--epochs", "1", "--memory", "40MiB", "--arg", "norm=frozen", "--arg", "depth=11")
    weights = ("--arg", "weights=runs/warm-up/checkpoints/last")
    shown = outcore_command("train", "run.yaml", *second, *weights, folder=folder)
    assert shown.returncode == 0 and "\nstreamed " in shown.stdout, shown.stderr


def test_sweep(tmp_path: Path) -> None:
    job = str(EXAMPLES / "sweep" / "job.py")
    words = (
        "--set",
        "lr=1e-3,1e-2",
        "--set",
        "dropout=0.0,0.2",
        "--steps",
        "2",
        "--device",
        "cpu",
        "--no-measure",
        "--json",
    )
    shown = outcore_command("sweep", job, *words, folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    settings = [(row["settings"]["lr"], row["settings"]["dropout"]) for row in json.loads(shown.stdout)["results"]]
    assert sorted(settings) == [(1e-3, 0.0), (1e-3, 0.2), (1e-2, 0.0), (1e-2, 0.2)]
    assert (tmp_path / "sweep" / "best.safetensors").exists()


def test_long_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    program, said = EXAMPLES / "long_sequence" / "train.py", []
    for words in ((), ("--baseline",)):
        script(program, "--steps", "40", "--batch", "2", "--hidden", "3", "--iterations", "20", *words)
        said.append(re.findall(r"loss (\d\.\d+)", capsys.readouterr().out))
    assert said[0] and said[0] == said[1]


@pytest.mark.parametrize("name", ["plain", "slide"])
def test_loop(capsys: pytest.CaptureFixture[str], name: str) -> None:
    script(EXAMPLES / "loops" / f"{name}.py")
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert len(losses) >= 3 and losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs"),
    [("monai", ("monai", "ignite")), ("huggingface", ("transformers", "accelerate")), ("lightning", ("lightning",))],
)
def test_loop_of_another_library(name: str, needs: tuple[str, ...]) -> None:
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    path = EXAMPLES / "loops" / f"with_{name}.py"
    program = (
        "import runpy; from tests.foreign.shim import define_torchvision_operators as define; define(); "
        f"runpy.run_path({str(path)!r}, run_name='__main__')"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=EXAMPLES.parent, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "0." in shown.stdout
