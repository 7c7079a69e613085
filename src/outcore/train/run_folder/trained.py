"""A trained network as it is used afterwards: its weights, and the preprocessing of its images.

Weights alone are not enough. A network that was trained on the second level of its slides, with the mean subtracted,
gives wrong answers on the first level without an error. A run has recorded how it prepared images and how it built its
model; using its weights by naming the run gives both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from outcore.data import ArraySource, Batch, Slide
from outcore.errors import CheckpointError
from outcore.run.checkpoint.restore import read_weights
from outcore.train.examples.examples import at_scale, resized
from outcore.train.run_folder.folder import RunFolder
from outcore.train.settings.config import Config, DataConfig

__all__ = ["TrainedNetwork", "read_image"]


@dataclass(frozen=True)
class TrainedNetwork:
    """Weights by the model's own names, and the settings they were trained under."""

    source: Path
    weights: dict[str, Tensor] = field(repr=False)
    data: DataConfig = field(default_factory=DataConfig)
    arguments: tuple[str, ...] = ()
    """Arguments of the model in the run's settings."""
    classes: tuple[str, ...] = ()
    """Names of the classes, where the run knew them."""
    key: str | None = None
    """Which output its metrics looked at, of several."""

    @classmethod
    def read(cls, path: Path) -> TrainedNetwork:
        """From a file of safetensors, a checkpoint, or the folder of a run, whose best weights are taken.

        >>> TrainedNetwork.read(Path("/nowhere"))
        Traceback (most recent call last):
        outcore.errors.CheckpointError: no weights in /nowhere; give a .safetensors file, a checkpoint or a run's folder
        """
        run = RunFolder(path)
        if run.config.is_file():
            config = Config.load(run.config)
            if not (run.best.exists() or run.last.exists()):
                raise CheckpointError(
                    f"{path} has saved no weights yet: its run ended before the first checkpoint; "
                    f"train it further: outcore train {run.config}"
                )
            weights = read_weights(run.best if run.best.exists() else run.last)
            return cls(path, weights, config.data, config.arguments, _classes(run, config), config.key)
        if path.is_dir():
            return cls(path, read_weights(path))
        try:
            return cls(path, load_file(path))
        except (OSError, SafetensorError) as error:
            why = f" ({error})" if path.exists() else ""
            raise CheckpointError(
                f"no weights in {path}{why}; give a .safetensors file, a checkpoint or a run's folder"
            ) from None

    def load_into(self, model: nn.Module) -> None:
        """Give a model these weights.

        Raises:
            CheckpointError: they are another model's.
        """
        wanted = model.state_dict()
        missing, extra = set(wanted) - set(self.weights), set(self.weights) - set(wanted)
        if missing or extra:
            names = ", ".join(sorted(missing)[:3] or sorted(extra)[:3])
            raise CheckpointError(
                f"{self.source} does not fit the model: {len(missing)} names are missing, {len(extra)} are unknown "
                f"({names}); use the weights of this model, or give its arguments with --arg"
            )
        for name, tensor in self.weights.items():
            if tensor.shape != wanted[name].shape:
                raise CheckpointError(
                    f"{self.source} does not fit the model: {name} has shape {list(tensor.shape)}, the model's has "
                    f"{list(wanted[name].shape)}; give the model's arguments with --arg"
                )
        model.load_state_dict(self.weights)


def _classes(run: RunFolder, config: Config) -> tuple[str, ...]:
    """The names that the run recorded, or had in its settings."""
    noted = run.read_facts().get("classes")
    if isinstance(noted, list) and noted and all(isinstance(name, str) for name in noted):
        return tuple(noted)
    return config.data.classes


def read_image(slide: Slide, data: DataConfig) -> Batch:
    """One image, still lazy, as a network that was trained under these settings sees its images."""
    image = at_scale(slide, data)
    shown = image if data.resize is None else ArraySource(resized(image, data.resize))
    return Batch((shown,), mean=data.mean, std=data.std)
