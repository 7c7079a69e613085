"""Mistakes in a job, one for each thing that a job says: one sentence that names it and what to do, and no traceback.

Every command takes every job; what a command does not use may be wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.command import outcore_command

pytestmark = pytest.mark.filterwarnings("ignore:outcore")  # said beside what a command refuses
GOOD = {
    "model": "return nn.Sequential(nn.Conv2d(3, 4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))",
    "batch": "return torch.rand(size, 3, 8, 8), torch.randint(2, (size,))",
    "loss": "return F.cross_entropy(output, target)",
    "optimizer": "return torch.optim.SGD(parameters, lr=0.1)",
}
ARGUMENTS = {"model": "", "batch": "size", "loss": "output, target", "optimizer": "parameters"}
EVERY = ("graph", "profile", "plan", "verify", "train", "whatif")
TRAINING = ("train",)
PLANNING = ("profile", "plan", "verify")
BOTTOM = ""
"""Lines below all functions, which may define one of them anew."""
# What is wrong: the function, its body (none: it is not there), who notices it, and what is said.
FAULTS: dict[str, tuple[str, str | None, tuple[str, ...], str]] = {
    "model raises": ("model", "raise ValueError('no weights here')", EVERY, "no weights here"),
    "model gives nothing": ("model", "pass", EVERY, "must return a torch.nn.Module"),
    "model needs a GPU": ("model", "return nn.Linear(1, 1).cuda()", EVERY, "model() of"),
    "a mistake in writing": (BOTTOM, "def (:", EVERY, "SyntaxError"),
    "a package that is not there": (BOTTOM, "import nosuchpackage", EVERY, "No module named 'nosuchpackage'"),
    "ends the program": (BOTTOM, "raise SystemExit(3)", EVERY, "SystemExit: 3"),
    "model is none": (BOTTOM, "model = None", EVERY, "has no function model()"),
    "model is no function": (BOTTOM, "model = nn.Flatten()", EVERY, "it must be a function"),
    "model calls itself": ("model", "return model()", EVERY, "RecursionError"),
    "model does nothing": ("model", "return nn.Sequential()", (*PLANNING, "train"), "nothing"),
    "forward raises": (
        BOTTOM,
        "class Net(nn.Linear):\n    def forward(self, x):\n        x.missing\n\n\ndef model():\n    return Net(8, 2)",
        EVERY,
        "missing",
    ),
    "a layer that is nowhere": (
        "model",
        "return nn.Sequential(nn.Flatten(), nn.Linear(192, 2, device='meta'))",
        TRAINING,
        "block 1",
    ),
    "no parameters": ("model", "return nn.Flatten()", TRAINING, "no parameter that requires a gradient"),
    "all frozen": ("model", "return nn.Linear(8, 2).requires_grad_(False)", TRAINING, "nothing to train"),
    "another number of channels": (
        "batch",
        "return torch.rand(size, 1, 8, 8), torch.zeros(size).long()",
        EVERY,
        "block 0",
    ),
    "real numbers of another kind": (
        "batch",
        "return torch.rand(size, 3, 8, 8).double(), torch.zeros(size).long()",
        TRAINING,
        "block 0",
    ),
    "batch takes no size": (BOTTOM, "def batch(): return GOOD", EVERY, "batch(size) of job.py cannot be called so"),
    "batch takes more": (BOTTOM, "def batch(size, side): return GOOD", EVERY, "missing a required argument: 'side'"),
    "batch does not look at its size": (
        "batch",
        "return torch.rand(5, 3, 8, 8), torch.zeros(5).long()",
        EVERY,
        "make as many examples as size says, or write size = 5 into the job",
    ),
    "batch is a generator": ("batch", "yield torch.rand(size, 3, 8, 8), None", EVERY, "it must return two"),
    "batch of arrays": ("batch", "return torch.rand(size, 3, 8, 8).numpy(), None", EVERY, "it must return tensors"),
    "batch raises": ("batch", "raise KeyError('mask')", EVERY, "KeyError: 'mask'"),
    "batch gives nothing": ("batch", "pass", EVERY, "it must return two"),
    "batch without targets": ("batch", "return torch.rand(size, 3, 8, 8)", EVERY, "it must return two"),
    "other targets": (
        "batch",
        "return torch.rand(size, 3, 8, 8), torch.zeros(size + 3).long()",
        TRAINING,
        "match target",
    ),
    "loss raises": ("loss", "return F.mse_loss(output, target.view(99))", TRAINING, "job.py:"),
    "loss needs more": (
        BOTTOM,
        "def loss(output, target, *, weight): return output.sum()",
        EVERY,
        "loss(output, target) of job.py cannot be called so: missing a required",
    ),
    "loss is not a number": ("loss", "return output.sum() * float('nan')", TRAINING, "the loss of step 1 is nan"),
    "loss without a gradient": ("loss", "return torch.zeros(())", TRAINING, "loss"),
    "loss that is no number": ("loss", "return output", TRAINING, "loss"),
    "classes beyond the last": (
        "batch",
        "return torch.rand(size, 3, 8, 8), torch.full((size,), 7)",
        TRAINING,
        "out of bounds",
    ),
    "optimizer takes nothing": (BOTTOM, "def optimizer(): pass", TRAINING, "takes 0 positional arguments"),
    "optimizer of nothing": (
        "optimizer",
        "return torch.optim.SGD([torch.zeros(1)], lr=0.1)",
        TRAINING,
        "would train nothing",
    ),
    "optimizer raises": ("optimizer", "return torch.optim.SGD(parameters, lr=-1)", TRAINING, "Invalid learning rate"),
    "optimizer gives nothing": ("optimizer", "pass", TRAINING, "it must return a torch optimizer"),
}
OPTIONS = {
    "train": ("-b", "2", "--steps", "1", "--out", "run"),
    "plan": ("--memory", "95%"),
    "verify": ("--memory", "95%"),
    "whatif": ("--if", "amp"),
    "sweep": ("--set", "lr=0.1,0.2", "--steps", "2"),
    "explore": ("--export", "page.html", "--seconds", "0"),
}


def write_job(folder: Path, fault: str) -> Path:
    which, body, _, _ = FAULTS[fault]
    functions = {**GOOD, which: body}
    if fault == "other targets":  # the loss that is assumed where a job has none
        functions["loss"] = None
    text = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
    for name, lines in functions.items():
        if lines is not None:
            text += f"\n\n{lines}\n" if name == BOTTOM else f"\n\ndef {name}({ARGUMENTS[name]}):\n    {lines}\n"
    (folder / "job.py").write_text(text)
    return folder / "job.py"


def faulty(commands: tuple[str, ...]) -> list[tuple[str, str]]:
    return [
        (command, fault) for fault, (_, _, noticed, _) in FAULTS.items() for command in noticed if command in commands
    ]


def check(command: str, fault: str, folder: Path) -> None:
    write_job(folder, fault)
    # By its whole path: a sweep keeps what it has loaded.
    shown = outcore_command(command, str(folder / "job.py"), *OPTIONS.get(command, ()), folder=folder)
    printed = shown.stdout + shown.stderr
    assert shown.returncode == 1, printed
    assert "Traceback" not in printed and "error: " in shown.stderr
    assert FAULTS[fault][3] in " ".join(shown.stderr.replace(f"{folder}/", "").split()), shown.stderr
    assert not (folder / "run").exists(), "a run that made no step leaves nothing"


@pytest.mark.parametrize(("command", "fault"), faulty(("train",)))
def test_training_says_in_a_sentence_what_is_wrong_with_a_job(command: str, fault: str, tmp_path: Path) -> None:
    check(command, fault, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "fault"), faulty(("graph", "profile", "plan", "verify", "whatif")))
def test_every_command_says_in_a_sentence_what_is_wrong_with_a_job(command: str, fault: str, tmp_path: Path) -> None:
    check(command, fault, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sweep", "explore"])
@pytest.mark.parametrize("fault", [fault for fault, (_, _, noticed, _) in FAULTS.items() if noticed is EVERY])
def test_so_do_the_commands_that_try_many_sizes_and_settings(command: str, fault: str, tmp_path: Path) -> None:
    check(command, fault, tmp_path)


def test_a_file_with_the_name_of_the_package_that_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "einops"]:  # of a test before this one
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "einops.py").write_text("from einops.layers.torch import Rearrange\n")
    shown = outcore_command("graph", "einops.py", folder=tmp_path)
    assert shown.returncode == 1 and "einops.py hides the package 'einops': give the file another name" in shown.stderr


def test_the_traceback_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(tmp_path, "loss raises")
    monkeypatch.setenv("OUTCORE_TRACEBACK", "1")
    shown = outcore_command("train", "job.py", *OPTIONS["train"], folder=tmp_path)
    assert shown.returncode == 1 and "Traceback" in shown.stderr and "target.view(99)" in shown.stderr
