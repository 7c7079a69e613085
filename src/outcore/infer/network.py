"""A network as it is used on slides: weights, one output, names of its classes, and how its images are prepared.

A model may return a tensor, or a dictionary or tuple of several (a segmentation network with an auxiliary output, a
transformer). Only one is written; `KeyedOutput` picks it by key, so that everything after sees one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.errors import JobError, suggest
from outcore.graph import Graph
from outcore.graph.record.recording import Ref
from outcore.graph.structure import device_of, leaves
from outcore.job import Job
from outcore.keras.twin import with_channels_first
from outcore.machine.units import counted
from outcore.train.run_folder.trained import TrainedNetwork
from outcore.train.settings.config import DataConfig

__all__ = ["InferNetwork", "KeyedOutput", "load_network"]


class KeyedOutput(nn.Module):
    """A model with one of its outputs."""

    def __init__(self, model: nn.Module, key: str, *, given: bool = True) -> None:
        """Keep the model.

        Args:
            model: returns several outputs.
            key: the name or number of one of them.
            given: by the user here; a run's own may be of a network that returns several in training alone.
        """
        super().__init__()
        self.model, self.key, self.given = model, key, given

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output under the key: of a dictionary by name, of a tuple or list by number."""
        made = self.model(*args, **kwargs)
        if isinstance(made, Mapping):
            if self.key not in made:
                raise JobError(f"the model returns no {self.key!r}; {suggest(self.key, map(str, made))}")
            return made[self.key]
        if isinstance(made, (tuple, list)):
            if not self.key.isdecimal() or int(self.key) >= len(made):
                raise JobError(f"--key {self.key}: the model returns {len(made)} outputs, 0 to {len(made) - 1}")
            return made[int(self.key)]
        if not self.given:
            return made
        raise JobError(f"--key {self.key}: the model returns one {type(made).__name__}; leave out --key")


@dataclass(frozen=True)
class InferNetwork:
    """A model in evaluation mode, and what belongs to it."""

    model: nn.Module = field(repr=False)
    data: DataConfig
    classes: tuple[str, ...] = ()
    key: str | None = None
    named: bool = False
    """Whether the user gave the names of the classes, rather than the run."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return device_of(self.model)

    def weights_digest(self) -> str:
        """A hash of all weights."""
        found = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.model.state_dict().items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def names(self, count: int) -> tuple[str, ...]:
        """A name for each of so many outputs: those of the classes where they fit, else numbers."""
        return self.classes if len(self.classes) == count else tuple(map(str, range(count)))

    def check_output(self, graph: Graph) -> None:
        """Refuse a model that returns several tensors; names the keys to choose from."""
        found = [path for path, _ in leaves(graph._running()[1].result, Ref)]
        if found == [""]:
            self._check_names(graph.values[graph.outputs[0]].shape)
            return
        names = list(dict.fromkeys(path.split(".")[0] for path in found)) or ["none"]
        raise JobError(
            f"the model returns {len(names)} outputs ({', '.join(names[:8])}); infer writes one: say --key {names[0]}"
        )

    def _check_names(self, shape: Sequence[int]) -> None:
        """Refuse names that were given for another number of classes than the network has."""
        count = shape[1] if len(shape) > 1 else 1
        if self.named and len(self.classes) != count and (count, len(self.classes)) != (1, 2):
            raise JobError(
                f"--classes names {counted(len(self.classes), 'class')} ({', '.join(self.classes[:8])}); the network "
                f"gives {count}: name as many"
            )


def load_network(
    job: str,
    *,
    weights: Path | None,
    untrained: bool = False,
    arguments: Sequence[str] = (),
    inputs: Sequence[str] = (),
    level: int | None = None,
    classes: Sequence[str] = (),
    key: str | None = None,
    device: torch.device | None = None,
) -> InferNetwork:
    """Build a job's model and give it its weights.

    Raises:
        JobError: there are no weights, and none were said to be wanted.
    """
    if weights is None and not untrained:
        raise JobError("infer needs weights: --weights runs/NAME, or a .safetensors file; without any, --untrained")
    if weights is not None and untrained:
        raise JobError(f"--weights {weights} and --untrained contradict each other; leave out one")
    trained = TrainedNetwork.read(weights) if weights is not None else None
    seen = trained.data if trained is not None else DataConfig()
    if level is not None:
        seen = replace(seen, level=level, microns_per_pixel=None)
    # The image says what the input is; a class asks for a shape only to make batches, and none is made here.
    shapes = inputs or (("1x1",) if ":" in job and not Path(job).exists() else ())
    given = (*(trained.arguments if trained is not None else ()), *arguments)
    model = Job.load(job, inputs=shapes, arguments=given).build()
    if trained is not None:
        trained.load_into(model)
    model = with_channels_first(model.to(device or torch.device("cpu")).eval())
    names = tuple(classes) or (trained.classes if trained is not None else ())
    one = key if key is not None or trained is None else trained.key
    if one is not None:
        model = KeyedOutput(model, one, given=key is not None).eval()
    return InferNetwork(model, seen, names, one, bool(classes))
