"""What an error message leaves out when a job's own code fails: the block it failed in, and the command that repairs an
install.

torch says which shapes did not match, and a traceback says on which line; the name of the block, as `outcore graph`
shows it, is in neither. It is read from the frames of the traceback: the outermost module is the model, the innermost
is where it happened. A torchvision built for another torch fails with a sentence about a missing operator.
"""

from __future__ import annotations

import re
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["block_of", "hints", "install_torchvision", "line_of_the_user", "matching_torchvision"]


def hints(error: BaseException) -> list[str]:
    """Lines to print beside an error's own words."""
    found = []
    if block := block_of(error):
        found.append(f"it happened in block {block}")
    words = " ".join(str(e) for e in _chain(error))
    if re.search(r"torchvision::\w+|torchvision.*undefined symbol", words):
        import torch

        found.append(
            f"the torchvision that is installed was not made for torch {torch.__version__}; type: "
            f"{install_torchvision(torch.__version__, _installed('torchvision'))}"
        )
    return found


def line_of_the_user(error: BaseException) -> str:
    """The innermost line of an error's traceback that is in no installed package: a job's, or of a module beside it."""
    import sysconfig

    installed = tuple({str(Path(path).resolve()) for path in sysconfig.get_paths().values()})
    ours = str(Path(__file__).resolve().parents[2])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = str(Path(frame.filename).resolve())
        if Path(path).is_file() and not path.startswith((ours, *installed)):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def block_of(error: BaseException) -> str:
    """The innermost block of the user's model in which an error was raised, with its type; empty if in none."""
    from torch import nn

    for one in _chain(error):
        modules: list[nn.Module] = []
        frames = one.__traceback__
        while frames is not None:
            owner = frames.tb_frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and not type(owner).__module__.startswith("outcore."):
                modules.append(owner)
            frames = frames.tb_next
        if modules and (path := _path(modules[0], modules[-1])):
            return f"{path} ({type(modules[-1]).__name__})"
    return ""


def matching_torchvision(torch_version: str) -> str:
    """The torchvision that belongs to a torch.

    >>> matching_torchvision("2.13.0+cpu"), matching_torchvision("2.0.1")
    ('0.28.*', '0.15.*')
    """
    return f"0.{int(torch_version.split('.')[1]) + 15}.*"


def install_torchvision(torch_version: str, installed: str | None) -> str:
    """The command that installs it. Where the number is right already, it was built for another kind of device.

    >>> install_torchvision("2.13.0+cpu", "0.20.1")
    "pip install 'torchvision==0.28.*'"
    >>> install_torchvision("2.13.0+cpu", "0.28.0")
    "pip install --force-reinstall --no-deps --index-url https://download.pytorch.org/whl/cpu 'torchvision==0.28.*'"
    """
    wanted = matching_torchvision(torch_version)
    if installed is None or not installed.startswith(wanted.rstrip("*")):
        return f"pip install 'torchvision=={wanted}'"
    _, _, kind = torch_version.partition("+")
    index = f"--index-url https://download.pytorch.org/whl/{kind} " if kind else ""
    return f"pip install --force-reinstall --no-deps {index}'torchvision=={wanted}'"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _path(model: nn.Module, inner: nn.Module) -> str:
    return next((name for name, module in model.named_modules() if module is inner), "")


def _chain(error: BaseException | None) -> list[Any]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
