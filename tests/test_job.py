"""A job is found however it is given, and says what is wrong with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import JobError
from outcore.job import _INSTALLED_AS, Input, Job

GOOD = """
import torch
size = 4
def model(width=8):
    return torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.ReLU())
def batch(size):
    return torch.randn(size, 5), torch.zeros(size)
"""


def write(folder: Path, text: str, name: str = "job.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_file_with_two_functions(tmp_path: Path) -> None:
    job = outcore.Job.load(write(tmp_path, GOOD), arguments=["width=3"])
    assert job.loss is None
    graph = job.capture()
    assert graph.values["input"].shape == (4, 5)
    assert graph.values["0#0:out"].shape == (4, 3)
    assert job.capture(7, training=False).values["input"].shape == (7, 5)


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "WIDTH = 6\n", "neighbour_of_job.py")
    job = outcore.Job.load(
        write(tmp_path, "from neighbour_of_job import WIDTH\n" + GOOD.replace("width=8", "width=WIDTH"))
    )
    assert job.capture().values["0#0:out"].shape == (4, 6)


def test_a_file_may_import_its_neighbours_when_its_functions_are_called(tmp_path: Path) -> None:
    write(tmp_path, "WIDTH = 6\n", "late_neighbour_of_job.py")
    late = "def model():\n    from late_neighbour_of_job import WIDTH as width\n"
    job = outcore.Job.load(write(tmp_path, GOOD.replace("def model(width=8):\n", late)))
    assert job.capture().values["0#0:out"].shape == (4, 6)


def test_files_of_two_folders_import_each_its_own_neighbours(tmp_path: Path) -> None:
    own = "def model():\n    pickle.dumps(Own())  # which is looked up in its module by name\n"
    text = "import pickle\nfrom parts.shape import WIDTH as width\nclass Own: pass\n" + GOOD.replace(
        "def model(width=8):\n", own
    )
    jobs = []
    for width in (5, 6):
        folder = tmp_path / str(width)
        (folder / "parts").mkdir(parents=True)
        write(folder / "parts", "", "__init__.py")
        write(folder / "parts", f"WIDTH = {width}\n", "shape.py")
        jobs.append(outcore.Job.load(write(folder, text)))
        assert jobs[-1].build()[0].out_features == width
    assert [job.build()[0].out_features for job in jobs] == [5, 6]


def test_a_file_that_cannot_be_imported_leaves_nothing_on_the_path(tmp_path: Path) -> None:
    before = list(sys.path)
    with pytest.raises(JobError):
        outcore.Job.load(write(tmp_path, "import no_such_package_anywhere\n"))
    assert sys.path == before


def test_a_class_with_shapes_and_arguments() -> None:
    job = outcore.Job.load("outcore.models:UNet", inputs=["2x3x64x64"], arguments=["width=4", "depth=2"])
    assert job.size == 2
    graph = job.capture()
    assert graph.values["image"].shape == (2, 3, 64, 64)
    assert job.capture(5).values["image"].shape == (5, 3, 64, 64)


def test_nothing_is_allocated_where_that_is_possible() -> None:
    job = outcore.Job(model=lambda: nn.Linear(200_000, 200_000), batch=lambda n: (torch.randn(n, 200_000), None))
    assert job.capture(1_000_000).root.parameters == 200_000 * 200_001


def test_a_model_that_needs_real_weights_gets_them() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, int(torch.ones(4).sum().item()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            return out if bool((x > -100).all()) else -out

    graph = outcore.Job(model=Looks, batch=lambda n: (torch.randn(n, 3), None)).capture(2)
    assert graph.values["layer#0:out"].shape == (2, 4)
    assert "real data" in graph.notes[0]


@pytest.mark.parametrize(
    ("text", "shape", "dtype", "name"),
    [
        ("1x3x512x512", (1, 3, 512, 512), torch.float32, None),
        ("2x128:int64", (2, 128), torch.int64, None),
        ("mask=2x128:bool", (2, 128), torch.bool, "mask"),
        ("7", (7,), torch.float32, None),
    ],
)
def test_shapes_as_typed(text: str, shape: tuple[int, ...], dtype: torch.dtype, name: str | None) -> None:
    assert Input.parse(text) == Input(shape, dtype, name)


def test_named_inputs_are_keywords() -> None:
    class Masked(nn.Module):
        def forward(self, *, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask

    import tests.test_job as here

    here.Masked = Masked  # type: ignore[attr-defined]
    job = outcore.Job.load("tests.test_job:Masked", inputs=["x=2x3", "mask=2x3:bool"])
    assert job.capture().inputs == ("x", "mask")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def model():\n    return 3\ndef batch(size):\n    return 1, 2\n",
            r"returned int; it must return a torch.nn.Module",
        ),
        ("def batch(size):\n    return 1, 2\n", r"has no function model\(\)"),
        ("model = 3\ndef batch(size):\n    return 1, 2\n", r"model in .* is a int; it must be a function"),
        (GOOD + "\ndef batch(size):\n    return torch.randn(size, 5)\n", r"must return two: inputs and targets"),
        (
            GOOD + "\ndef batch(size):\n    raise RuntimeError('no data')\n",
            r"batch\(4\) .* failed at job.py:\d+: RuntimeError: no data",
        ),
        ("import nothing_of_that_name\n", r"cannot be imported at job.py:1: ModuleNotFoundError"),
        ("def model(:\n", r"cannot be imported at job.py:1: SyntaxError"),
        (GOOD + "\ndef batch(size):\n    return torch.randn(size, 6), None\n", r"in block|Linear|shape"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(outcore.OutcoreError, match=message):
        outcore.Job.load(write(tmp_path, text)).capture()


@pytest.mark.parametrize(
    ("text", "inputs", "arguments", "message"),
    [
        ("nowhere.py", [], [], r"no file nowhere.py; write one with these two functions"),
        ("no_such_package:Net", ["1x3"], [], r"no module 'no_such_package'"),
        ("outcore.models:UNt", ["1x3"], [], r"did you mean UNet"),
        ("outcore.models", ["1x3"], [], r"neither a file nor package.module:Class"),
        ("outcore.models:UNet", [], [], r"--input 1x3x224x224"),
        ("outcore.models:UNet", ["1x3x"], [], r"is not a shape"),
        ("outcore.models:UNet", ["1x3:floaty"], [], r"no dtype 'floaty'"),
        ("outcore.models:UNet", ["0x3x64x64"], [], r"holds nothing; every size is at least 1"),
        ("outcore.models:UNet", ["1x3"], ["width"], r"must be name=value"),
        ("outcore.models:UNet", ["1x3x64x64"], ["widht=3"], r"--arg widht: .* did you mean width"),
        ("outcore.models:UNet", ["1x4x64x64"], ["width=4"], r"expected input\[1, 4, 64, 64\] to have 3 channels"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(text: str, inputs: list[str], arguments: list[str], message: str) -> None:
    with pytest.raises(outcore.OutcoreError, match=message):
        outcore.Job.load(text, inputs=inputs, arguments=arguments).capture()


def test_an_argument_that_is_not_there_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(outcore.OutcoreError, match=r"--arg widht: outcore.models:UNet has no such argument; did"):
        outcore.Job.load("outcore.models:UNet", inputs=["2x3x64x64"], arguments=["widht=4"])
    with pytest.raises(outcore.OutcoreError, match=r"--arg depth: model\(\) of .*job.py has no such argument; did"):
        outcore.Job.load(write(tmp_path, GOOD), arguments=["depth=4"])
    with pytest.raises(outcore.OutcoreError, match=r"--arg depth: model\(\) of .*job.py takes no arguments"):
        outcore.Job.load(write(tmp_path, GOOD.replace("width=8", "").replace("width)", "8)")), arguments=["depth=4"])


@pytest.mark.parametrize(
    ("imported", "said"),
    [
        (
            "nosuchpackage",
            r"No module named 'nosuchpackage'; if it is a package, type: \S+ -m pip install nosuchpackage;",
        ),
        ("json.nosuch", r"No module named 'json.nosuch'(; 'json' is not a package)?$"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_the_line_that_installs_it(
    tmp_path: Path, imported: str, said: str
) -> None:
    (tmp_path / "job.py").write_text(f"import {imported}\n")
    with pytest.raises(JobError, match=said):
        Job.load(str(tmp_path / "job.py"))


def test_packages_are_named_as_pip_knows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_INSTALLED_AS, "nosuchpackage", "no-such-package")
    with pytest.raises(JobError, match=r"no module 'nosuchpackage' here; .* -m pip install no-such-package;"):
        Job.load("nosuchpackage.nets:Net", inputs=("1x3",))


def test_a_file_of_another_kind_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "slides.csv").write_text("path,label\n")
    with pytest.raises(JobError, match=r"slides\.csv is not a Python file; give one with model\(\) and batch\(size\)"):
        Job.load(str(tmp_path / "slides.csv"))


def test_classes_of_a_file_find_the_module_that_they_are_of(tmp_path: Path) -> None:
    """Dataclasses whose annotations are strings, `typing.get_type_hints` and pickle look it up by its name."""
    (tmp_path / "hints.py").write_text(
        "from __future__ import annotations\n"
        "import pickle, typing\n"
        "from dataclasses import dataclass\n"
        "import torch\n\n"
        "@dataclass\nclass Config:\n    width: int = 3\n    kind: typing.ClassVar[str] = 'x'\n\n"
        "def model():\n"
        "    assert typing.get_type_hints(Config)['width'] is int\n"
        "    return torch.nn.Linear(4, pickle.loads(pickle.dumps(Config())).width)\n\n"
        "def batch(size):\n    return torch.zeros(size, 4)\n"
    )
    assert Job.load(str(tmp_path / "hints.py")).build().out_features == 3


def test_a_file_that_was_changed_within_a_second_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "quick.py"
    text = GOOD.replace("8", "{}")
    for width in (3, 5, 7):
        file.write_text(text.format(width))
        os.utime(file, (10**9, 10**9))
        assert Job.load(str(file)).build()[0].out_features == width
