"""`torch.compile` with a memory budget: compiled ahead, kept as files, and loaded when it is measured.

Compiling a network for a budget takes a processor one to five minutes, measuring it a second. So `compile_ahead.py`
compiles every case once and keeps what torch offers for that (`torch.compiler.save_cache_artifacts`: both directions
with their kernels, and which variant of a kernel was the fastest); a run loads it and traces the network alone. Nothing
is left out or chosen by us: torch takes what is kept only if model, shapes, settings and versions are the same, and
compiles as always otherwise (`loaded` in a row says which).
"""

from __future__ import annotations

import lzma
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases import Case
from networks import Training

Enter = Callable[[], None]
SUFFIXES = (".code.xz", ".tuned.xz")
"""What is kept of a case: compiled code, and what was measured of it in the first step."""


@dataclass(frozen=True)
class Compiled:
    """A case under `torch.compile`, told to keep a share of what its partitioner would."""

    case: Case
    budget: float
    folder: Path | None = None
    """Where compiled code is kept."""

    @property
    def kept(self) -> list[Path]:
        """The files of this case."""
        return [self.folder / f"{self.case.label}-{self.budget}{suffix}" for suffix in SUFFIXES] if self.folder else []

    def ready(self, enter: Enter) -> tuple[Training, dict[str, Any]]:
        """A training that is compiled and has made its first step; memory is asked for when there is code."""
        import torch._functorch.config as config
        from torch._dynamo.utils import counters
        from torch._inductor.compile_fx import compile_fx

        torch_first()
        torch._dynamo.reset()
        counters.clear()
        config.activation_memory_budget = self.budget
        config.force_non_lazy_backward_lowering = True  # so that both directions are compiled before memory is taken
        for path in self.kept:
            if path.exists():
                torch.compiler.load_cache_artifacts(lzma.decompress(path.read_bytes()))
        took: dict[str, float] = {}

        def inductor(module: Any, inputs: Any) -> Callable[..., Any]:
            begun = time.time()
            code = compile_fx(module, inputs)
            took["compile_s"] = round(took.get("compile_s", 0.0) + time.time() - begun, 1)
            self.keep(0)
            enter()
            return code

        training = self.case.fresh()
        training.model = torch.compile(training.model, backend=inductor)
        training.step()
        self.keep(1)
        return training, took | {"loaded": counters["aot_autograd"]["autograd_cache_hit"] > 0}

    def keep(self, part: int) -> None:
        """What was made since the last time, unless there is such a file."""
        from torch.compiler._cache import CacheArtifactManager

        made = torch.compiler.save_cache_artifacts()
        CacheArtifactManager.clear()  # each file is read by itself
        if made is None or not self.kept or (path := self.kept[part]).exists():
            return
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(lzma.compress(made[0], preset=2))
        unfinished.replace(path)


def torch_first() -> None:
    """Let what is kept be found by a program that has imported other modules before.

    The key is a hash of pickles, and pickle names an object without a module (`torch.strided`) by the first module that
    has it, in the order of imports.
    """
    for name in [name for name in sys.modules if name != "torch"]:
        sys.modules[name] = sys.modules.pop(name)
