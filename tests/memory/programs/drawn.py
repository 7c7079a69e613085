"""Programs drawn at random: the source of a model and of its training loop, from one number.

`draw(seed)` writes Python text, so that a program which differs can be printed, read and cut down. A model is a class
whose forward is a list of statements over named values of three kinds (rows, sequences, images), each of which makes a
new value of one kind: a layer, a function, a method, a write in place, a branch, a loop, a region, a nested function,
something kept on the model. What a block makes inside it stays inside, so every value that is named exists. The loop is
written out step by step: what it changes before and after each forward, how it comes to gradients, what it notes.

`outcome(seed)` runs the text plainly and under policies and compares what both noted. A program that plain PyTorch
refuses is no finding, whatever happens under policies; nor is one that plain PyTorch does not repeat.

``python -m tests.memory.programs.drawn SEED [SEED] [MODE] [--device cuda]`` prints one program and how it ended, or
runs a range of them.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import faulthandler
import linecache
import random
import sys
import traceback
import types
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import outcore

from .drawn_loop import ProgramWriter
from .run import Run, differences, square

__all__ = ["Outcome", "draw", "mode_of", "outcome"]

_MODES = ("recompute", "recompute", "mixture", "mixture", "mixture", "offload", "encode", "keep")


def draw(seed: int) -> str:
    """The source of a program."""
    return ProgramWriter(seed).program()


def mode_of(seed: int) -> str:
    """The policies under which a program runs."""
    return random.Random(f"mode {seed}").choice(_MODES)


# What the programs call


def _release(run: Run, model: nn.Module) -> None:
    """Let go of a model that is managed."""
    if run.mode is not None:
        outcore.release(model)
        run.managed = [m for m in run.managed if m is not model]


def _copied(run: Run, model: nn.Module) -> nn.Module:
    """A copy of a model, which goes on instead."""
    model.seen, model.kept, model.aux, model.carried, model.state = [], None, 0.0, None, None  # type: ignore[assignment]
    for part in model.modules():
        if hasattr(part, "carried"):
            part.seen, part.kept, part.aux, part.carried = [], None, 0.0, None  # type: ignore[assignment]
    return copy.deepcopy(model)


def _reset(model: nn.Module) -> None:
    """Let go of what is carried from call to call with its graph."""
    for part in model.modules():
        if hasattr(part, "carried"):
            part.carried, part.aux = None, 0.0  # type: ignore[assignment]


def _square_of(output: Any) -> torch.Tensor:
    """A number of what a model returns without gradients."""
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    if isinstance(output, dict):
        output = list(output.values())
    return torch.stack([_square_of(o) for o in output if isinstance(o, torch.Tensor)]).sum()


def _note_attributes(run: Run, model: nn.Module) -> None:
    """Note what forward left on the model and its parts."""
    for part in model.modules():
        if not hasattr(part, "recent"):
            continue
        kept: Any = part.kept
        run.note(part.calls, part.count, part.options.n, list(part.recent), list(part.sizes["inner"]))  # type: ignore
        run.note(*part.seen, *part.table.values(), part.aux, part.state, kept)  # type: ignore
        if isinstance(kept, torch.Tensor):
            run.note(kept.requires_grad)
            if kept.retains_grad:
                run.note(kept.grad)


def _refuse(*_: Any) -> None:
    raise ArithmeticError("a hook refuses")


def _scaled(forward: Any) -> Any:
    return lambda *args, **kwargs: forward(*args, **kwargs) * 1.2


def _names() -> dict[str, Any]:
    return {
        "checkpoint": checkpoint,
        "collections": collections,
        "copied": _copied,
        "F": F,
        "given": lambda *args, **kwargs: (args, kwargs),
        "nn": nn,
        "note_attributes": _note_attributes,
        "np": np,
        "parametrizations": parametrizations,
        "parametrize": parametrize,
        "random": random,
        "refuse": _refuse,
        "release": _release,
        "reset": _reset,
        "scaled": _scaled,
        "square": square,
        "square_of": _square_of,
        "torch": torch,
        "trained": lambda model: [p for p in model.parameters() if p.requires_grad],
        "types": types,
    }


# How a program ends


@dataclass
class Outcome:
    """How a program ended."""

    seed: int
    mode: str
    ended: str
    """"same", "plain refuses", "plain differs from itself", "differs" or "raises"."""
    told: str = ""

    @property
    def found(self) -> bool:
        """Whether it is a finding."""
        return self.ended in ("differs", "raises")


_DEVICE = torch.device("cpu")
"""Where programs make their models and data."""


def _run(source: str, mode: str | None, seed: int, name: str) -> tuple[Run, BaseException | None]:
    """Run a program from one random state."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**31)
    run = Run(mode, seed)
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    space: dict[str, Any] = {**_names(), "__name__": "drawn"}
    if _DEVICE.type != "cpu":  # a generator does not follow the default device
        source = source.replace("torch.Generator()", f"torch.Generator({str(_DEVICE)!r})")
    error: BaseException | None = None
    with warnings.catch_warnings(), contextlib.nullcontext() if _DEVICE.type == "cpu" else _DEVICE:
        warnings.simplefilter("ignore")
        exec(compile(source, name, "exec"), space)
        try:
            space["program"](run)
        except Exception as raised:
            error = raised
        for model in run.managed:
            outcore.release(model)
    return run, error


def outcome(seed: int, mode: str | None = None, source: str | None = None) -> Outcome:
    """Run a program plainly and under policies."""
    source, mode = source or draw(seed), mode or mode_of(seed)
    name = f"<drawn {seed}>"
    plain, refused = _run(source, None, seed, name)
    managed, raised = _run(source, mode, seed, name)
    if refused is not None:
        told = "".join(traceback.format_exception(refused)[-3:])
        common = min(len(plain.notes), len(managed.notes))
        plain.notes, managed.notes = plain.notes[:common], managed.notes[:common]
        if not differences(plain, managed):
            return Outcome(seed, mode, "plain refuses", told)
    elif raised is not None:
        told = "".join(traceback.format_exception(raised))
        return Outcome(seed, mode, "raises", told)
    elif not differences(plain, managed):
        return Outcome(seed, mode, "same")
    again, _ = _run(source, None, seed, name)
    again.notes = again.notes[: len(plain.notes)]
    if differences(plain, again):
        return Outcome(seed, mode, "plain differs from itself")
    found = differences(plain, managed)
    return Outcome(seed, mode, "differs", f"{len(found)} of {len(plain.notes)} notes: {', '.join(found[:8])}")


def _main(arguments: list[str]) -> int:
    """Print one program and how it ended, or run a range of them."""
    faulthandler.enable()
    torch.set_num_threads(1)
    if "--device" in arguments:
        global _DEVICE
        at = arguments.index("--device")
        _DEVICE, arguments = torch.device(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]
        torch.use_deterministic_algorithms(True, warn_only=True)
    first = int(arguments[0])
    if len(arguments) < 2 or not arguments[1].isdigit():
        mode = arguments[1] if len(arguments) > 1 else None
        print(draw(first))
        print(outcome(first, mode))
        return 0
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(first, int(arguments[1])):
        faulthandler.dump_traceback_later(120, exit=True)
        ended = outcome(seed, arguments[2] if len(arguments) > 2 else None)
        counts[ended.ended] += 1
        if ended.found or ended.ended == "plain refuses":
            last = ended.told.strip().splitlines()
            print(seed, ended.mode, ended.ended, last[-1][:200] if last else "", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
