"""What every command takes: a model, a batch of any size, a loss, an optimizer.

A job is given in one of three ways, all the same to the rest of outcore:

- a Python file with functions ``model()`` and ``batch(size)``, and if wanted ``loss(output, target)``,
  ``optimizer(params)`` and ``dataset(split)``;
- ``package.module:Class`` with the shapes of its inputs;
- ``Job(...)`` in code.

Everything in it is called late and may be the user's own code, so every failure is reported with the place it came
from. A Keras model, on any backend, is taken through its torch twin (`outcore.keras`).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from outcore.errors import CaptureError, JobError, ModelError, suggest
from outcore.graph import Graph, capture
from outcore.graph.source import blame
from outcore.graph.structure import leaves
from outcore.keras.installed import as_module, repeatable
from outcore.load_order import settle_triton

_EXAMPLE = """\
def model():
    return torchvision.models.resnet50()

def batch(size):
    return torch.randn(size, 3, 224, 224), torch.randint(1000, (size,))
"""

_INSTALLED_AS = {
    "PIL": "Pillow",
    "cv2": "opencv-python-headless",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""Packages that pip knows by another name than Python."""
_FOLDERS: set[str] = set()
"""Of the files that were loaded."""
_CALLED = {"batch": "size", "loss": "output, target", "dataset": "split"}
"""What outcore gives functions of a job; a sweep gives ``model`` and ``optimizer`` more."""


@dataclass(frozen=True)
class Input:
    """Shape and dtype of one input: ``1x3x512x512``, ``2x128:int64``, ``mask=2x128:bool``."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    name: str | None = None
    """Keyword to pass it under; none to pass it by position."""

    @classmethod
    def parse(cls, text: str) -> Input:
        """Read the form used on the command line."""
        match = re.fullmatch(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:[x,]\d+)*)(?::(?P<dtype>\w+))?", text)
        if not match:
            raise JobError(
                f"--input {text!r} is not a shape; write for example 1x3x512x512, 2x128:int64 or mask=2x128:bool"
            )
        dtype = getattr(torch, match["dtype"] or "float32", None)
        if not isinstance(dtype, torch.dtype):
            raise JobError(
                f"--input {text!r}: torch has no dtype {match['dtype']!r}; write for example :float32 or :int64"
            )
        shape = tuple(int(n) for n in re.split("[x,]", match["shape"]))
        if 0 in shape:
            raise JobError(f"--input {text!r} holds nothing; every size is at least 1")
        return cls(shape, dtype, match["name"])

    def tensor(self, size: int | None, device: str = "cpu") -> torch.Tensor:
        """A tensor of this shape, its first dimension replaced by `size`; random, or zeros for integers."""
        shape = self.shape if size is None else (size, *self.shape[1:])
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(shape, dtype=self.dtype, device=device)
        return torch.zeros(shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Job:
    """A model to train: how to build it, how to get a batch, and how it learns.

    >>> import torch, outcore
    >>> job = outcore.Job(
    ...     model=lambda: torch.nn.Linear(4, 2),
    ...     batch=lambda size: (torch.randn(size, 4), torch.randn(size, 2)),
    ...     loss=torch.nn.functional.mse_loss,
    ... )
    >>> job.capture(8).values["input"].shape
    (8, 4)
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    name: str = "job"
    dataset: Callable[[str], Any] | None = field(default=None, kw_only=True)
    """Numbered pairs of input and target for ``"train"`` and for ``"validation"``, which may be None."""
    size: int = field(default=1, kw_only=True)
    """Batch size used when none is asked for."""
    settings: tuple[str, ...] = field(default=(), kw_only=True)
    """Names that ``model()`` of a file or the constructor of a class takes, for sweeps."""

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise JobError(f"size of {self.name} is {self.size!r}; it must be a whole number of at least 1: size = 8")

    @classmethod
    def load(cls, text: str, *, inputs: Sequence[str] = (), arguments: Sequence[str] = ()) -> Job:
        """Find a job by what a user types.

        Args:
            text: ``job.py`` or ``package.module:Class``.
            inputs: shapes, for a class.
            arguments: ``name=value`` for the constructor, for a class, or for ``model()`` of a file.
        """
        values = dict(_argument(a) for a in arguments)
        if text.endswith(".py") or "/" in text or Path(text).is_file():
            if inputs:
                raise JobError(f"--input is for package.module:Class; {text} has its own batch(size)")
            return _from_file(Path(text), values)
        return _from_class(text, [Input.parse(i) for i in inputs], values)

    @property
    def update(self) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
        """What makes the optimizer whose memory is counted: the job's own, or AdamW, with which others are trained."""
        return self.optimizer if self.optimizer is not None else torch.optim.AdamW

    def build(self, device: str | None = None) -> nn.Module:
        """The model, freshly made; on the ``meta`` device it takes no memory."""
        with repeatable() if _has_keras() else contextlib.nullcontext():
            built = self._call("model", self.model, device=device)
        if _has_keras():
            built = self._call("model", lambda: as_module(built), device=device)
        if not isinstance(built, nn.Module):
            raise JobError(f"model() of {self.name} returned {type(built).__name__}; it must return a torch.nn.Module")
        return built

    def example(
        self, size: int | None = None, device: str | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """A batch as positional arguments, keyword arguments and targets."""
        inputs, targets = self.made_batch(size, device)
        if isinstance(inputs, dict):
            return (), dict(inputs), targets
        return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}, targets

    def made_batch(self, size: int | None = None, device: str | None = None) -> tuple[Any, Any]:
        """Inputs and targets as ``batch(size)`` makes them; a `JobError` where it fails or makes something else."""
        made = self._call("batch", self.batch, size or self.size, device=device)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            shown = f"{len(made)} values" if isinstance(made, (tuple, list)) else type(made).__name__
            raise JobError(
                f"batch(size) of {self.name} returned {shown}; it must return two: inputs and targets "
                "(None for targets if there are none)"
            )
        if not _has_keras() and any(True for _ in leaves(made, np.ndarray)):
            raise JobError(
                f"batch(size) of {self.name} returned arrays of numpy; it must return tensors: torch.from_numpy(array)"
            )
        return made[0], made[1]

    def capture(self, size: int | None = None, *, training: bool = True) -> Graph:
        """The graph of the model for one batch, without memory for weights or data where that is possible."""
        try:
            model = self.build("meta").train(training)
            args, kwargs, _ = self.example(size, "meta")
            return capture(model, args, kwargs)
        except (CaptureError, JobError, NotImplementedError):
            model = self.build().train(training)
            args, kwargs, _ = self.example(size)
            return capture(model, args, kwargs)

    def _call(self, what: str, function: Callable[..., Any], *args: Any, device: str | None = None) -> Any:
        try:
            if device is None:
                return function(*args)
            with torch.device(device):
                return function(*args)
        except JobError:
            raise
        except ModelError as error:
            raise JobError(f"{what}() of {self.name}: {error}") from error
        except (Exception, SystemExit) as error:
            given = ", ".join(map(str, args))
            raise JobError(f"{what}({given}) of {self.name} failed{_place(error)}: {_first_line(error)}") from error


class _JobLoader(importlib.machinery.SourceFileLoader):
    """Compiles a job's file each time it is loaded.

    Python recognizes compiled files by the size of the source and the second of its last change: a job that was changed
    within a second (``lr=0.1`` to ``lr=0.2``) would run as it was before.
    """

    def get_code(self, fullname: str) -> types.CodeType:
        """The code of the file as it is now."""
        return self.source_to_code(self.get_data(self.path), self.path)


def _from_file(path: Path, values: dict[str, Any]) -> Job:
    if not path.is_file():
        raise JobError(f"no file {path}; write one with these two functions:\n\n{_EXAMPLE}")
    if path.suffix != ".py":
        raise JobError(f"{path} is not a Python file; give one with model() and batch(size), like job.py")
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path, loader=_JobLoader(name, str(path.absolute())))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if _has_keras(text := path.read_text(encoding="utf-8", errors="replace")):
        settle_triton(text)
    folder = str(path.resolve().parent)
    _forget_neighbours_of_other_jobs(folder)
    searched = list(sys.path)
    sys.path[:] = [folder, *(p for p in searched if p != folder)]  # and stays: model() may import when it is called
    sys.modules[name] = module  # dataclasses, typing and pickle look up the module of a class by its name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a file that ends the program must not end it as a success
        del sys.modules[name]
        sys.path[:] = searched
        said = f"{path} cannot be imported{_place(error)}: {_first_line(error)}"
        raise JobError(said + (_hidden_package(path, error) or _missing_package(error))) from error
    _FOLDERS.add(folder)
    functions = {name: getattr(module, name, None) for name in ("model", "batch", "loss", "optimizer", "dataset")}
    for name, function in functions.items():
        if function is None and name in ("model", "batch"):
            raise JobError(
                f"{path} has no function {name}(); a job needs model() and batch(size), for example:\n\n{_EXAMPLE}"
            )
        if function is not None and (not callable(function) or (name == "model" and isinstance(function, nn.Module))):
            raise JobError(f"{name} in {path} is a {type(function).__name__}; it must be a function")
        if function is not None and name in _CALLED:
            _check_call(f"{name}({_CALLED[name]}) of {path}", function, _CALLED[name].count(",") + 1)
    build = functions["model"]
    assert build is not None and functions["batch"] is not None
    _check_arguments(f"model() of {path}", build, values)
    return Job(
        model=lambda: build(**values),
        batch=_checked_batch(functions["batch"], str(path)),
        loss=functions["loss"],
        optimizer=_checked_optimizer(functions["optimizer"], str(path)),
        dataset=functions["dataset"],
        name=str(path),
        size=getattr(module, "size", 1),
        settings=_taken(build),
    )


def _module_name(path: Path) -> str:
    """Under which a job's file is imported: no other file is, so that the classes of each stay those of its own."""
    names = (f"outcore_job_{path.stem}{f'_{n}' if n else ''}" for n in itertools.count())
    return next(n for n in names if n not in sys.modules or sys.modules[n].__file__ == str(path.absolute()))


def _forget_neighbours_of_other_jobs(folder: str) -> None:
    """Let a file import its own neighbours, where one of the same name was imported beside another job before."""
    for top in {name.partition(".")[0] for name in sys.modules}:
        file = Path(getattr(sys.modules.get(top), "__file__", None) or "")
        where = file.parent.parent if file.name == "__init__.py" else file.parent
        if str(where) in _FOLDERS - {folder} and importlib.machinery.PathFinder.find_spec(top, [folder]):
            for name in [name for name in sys.modules if name.partition(".")[0] == top]:
                del sys.modules[name]


def _missing_package(error: BaseException) -> str:
    """What to type where a package is not installed; a part that an installed one lacks is not to be had so."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not package or importlib.util.find_spec(package) is not None:
        return ""
    name = _INSTALLED_AS.get(package, package)
    return f"; if it is a package, type: {sys.executable} -m pip install {name}; if it is a file, put it beside the job"


def _hidden_package(path: Path, error: BaseException) -> str:
    """What to do where a file beside the job, or the job itself, has the name of the package that it imports."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    own = path.parent / f"{package}.py"
    return f"; {own} hides the package {package!r}: give the file another name" if package and own.is_file() else ""


def _check_call(what: str, function: Callable[..., Any], arguments: int) -> None:
    """Refuse a function that cannot be called as a job's is, before anything is made for it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*range(arguments))
    except TypeError as error:
        raise JobError(f"{what} cannot be called so: {error}; give other arguments a default") from error


def _checked_batch(own: Callable[[int], Any], name: str) -> Callable[[int], Any]:
    """A job's ``batch(size)``, with a `JobError` where it makes another number of examples, whatever the size."""

    @functools.cache
    def makes_always(size: int, device: str) -> tuple[tuple[int, ...], ...]:
        """The shapes that it makes of one more too; none where they differ, as they should."""
        with torch.random.fork_rng(devices=[]), torch.device(device):
            one, other = (_shapes(own(n)) for n in (size, size + 1))
        return one if one == other else ()

    @functools.wraps(own)
    def made(size: int) -> Any:
        found = own(size)
        shapes = _shapes(found)
        if shapes and shapes[0][:1] != (size,) and (always := makes_always(size, str(torch.get_default_device()))):
            shown = "x".join(map(str, always[0])) or "a number"
            fixed = f", or write size = {always[0][0]} into the job" if always[0] else ""
            raise JobError(
                f"batch({size}) of {name} gives {shown}, and so does batch({size + 1}); make as many examples as size "
                f"says{fixed}"
            )
        return found

    return made


def _shapes(made: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of all tensors of a batch, inputs first."""
    return tuple(tuple(tensor.shape) for _, tensor in leaves(made, torch.Tensor))


def _checked_optimizer(own: Callable[..., Any] | None, name: str) -> Callable[..., torch.optim.Optimizer] | None:
    """A job's ``optimizer(parameters)``, with a `JobError` where it fails or makes something else."""
    if own is None:
        return None

    @functools.wraps(own)
    def made(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        try:
            optimizer = own(*args, **kwargs)
        except Exception as error:
            raise JobError(f"optimizer(parameters) of {name} failed{_place(error)}: {_first_line(error)}") from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            found = type(optimizer).__name__
            raise JobError(f"optimizer(parameters) of {name} returned {found}; it must return a torch optimizer")
        return optimizer

    return made


def _has_keras(source: str = "") -> bool:
    """Whether Keras or TensorFlow is imported, or Python text speaks of it; without, no model can be theirs."""
    return any(name in sys.modules or name in source for name in ("keras", "tf_keras", "tensorflow"))


def _from_class(text: str, inputs: list[Input], values: dict[str, Any]) -> Job:
    package, colon, name = text.partition(":")
    if not colon or not name:
        raise JobError(
            f"{text!r} is neither a file nor package.module:Class; write for example torchvision.models:resnet50"
        )
    if not inputs:
        raise JobError(f"{text} needs the shape of its input; add for example --input 1x3x224x224")
    if _has_keras(package):
        settle_triton(package)
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise JobError(f"no module {error.name!r} here{_missing_package(error)}") from error
    except (Exception, SystemExit) as error:
        raise JobError(f"{package} cannot be imported{_place(error)}: {_first_line(error)}") from error
    finally:
        sys.path.remove("")
    make = getattr(module, name, None)
    if not callable(make):
        known = [n for n in dir(module) if callable(getattr(module, n, None)) and n[0] != "_"]
        raise JobError(f"{package} has no class or function {name!r}; {suggest(name, known)}")
    _check_arguments(text, make, values)
    sizes = {i.shape[0] for i in inputs if i.shape}

    def batch(size: int) -> tuple[Any, None]:
        device = str(torch.get_default_device())
        made = [(i, i.tensor(size if i.shape else None, device)) for i in inputs]
        if any(i.name for i in inputs):
            if not all(i.name for i in inputs):
                raise JobError("either all inputs have a name (--input mask=2x128:bool) or none has")
            return {i.name: tensor for i, tensor in made}, None
        return tuple(tensor for _, tensor in made), None

    return Job(model=lambda: make(**values), batch=batch, name=text, size=min(sizes, default=1), settings=_taken(make))


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise JobError(f"--arg {text!r} must be name=value, for example --arg classes=10")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _check_arguments(what: str, make: Callable[..., Any], values: dict[str, Any]) -> None:
    """Refuse an argument that a function does not have, with the nearest that it has."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # written in C
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    taken = _taken(make)
    for name in values:
        if name not in taken:
            instead = f"has no such argument; {suggest(name, taken)}" if taken else "takes no arguments"
            raise JobError(f"--arg {name}: {what} {instead}")


def _taken(make: Callable[..., Any]) -> tuple[str, ...]:
    """The names that can be given to a function."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # written in C
        return ()
    return tuple(name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _place(error: BaseException) -> str:
    place = blame(error)
    return f" at {place}" if place else ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
