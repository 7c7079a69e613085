"""The suite: eight families as jobs, at full size and at one that a CPU trains in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outcore.bench import networks
from outcore.errors import JobError, suggest
from outcore.job import Job

__all__ = ["FAMILIES", "family"]


def _words(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def _images(small: bool) -> Job:
    side = 64 if small else 224
    return Job(
        model=lambda: networks.ResNet((1, 1, 1, 1) if small else (3, 4, 6, 3)),
        batch=lambda n: (torch.randn(n, 3, side, side), torch.randint(1000, (n,))),
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        size=4 if small else 64,
    )


def _detection(small: bool) -> Job:
    side, depths = (96, (1, 1, 1, 1)) if small else (320, (3, 4, 6, 3))
    anchors = 6 * sum((-(-side // stride)) ** 2 for stride in (16, 32))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        classes = F.cross_entropy(output[..., :81].flatten(0, 1).float(), target.flatten())
        return classes + F.smooth_l1_loss(output[..., 81:], torch.zeros_like(output[..., 81:]))

    return Job(
        model=lambda: networks.Detector(depths),
        batch=lambda n: (torch.randn(n, 3, side, side), torch.randint(81, (n, anchors))),
        loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        size=2 if small else 32,
    )


def _translation(small: bool) -> Job:
    width, layers, words, length = (64, 2, 1000, 16) if small else (512, 6, 32000, 64)
    return Job(
        model=lambda: networks.Translator(width, layers, words),
        batch=lambda n: (
            (torch.randint(words, (n, length)), torch.randint(words, (n, length))),
            torch.randint(words, (n, length)),
        ),
        loss=_words,
        optimizer=torch.optim.Adam,
        size=4 if small else 64,
    )


def _speech(small: bool) -> Job:
    """Letters are given frame by frame: CTC, which aligns them, computes on the data and cannot be recorded without."""
    width, layers, frames = (64, 1, 80) if small else (800, 3, 400)
    return Job(
        model=lambda: networks.DeepSpeech(width, layers),
        batch=lambda n: (torch.randn(n, 1, 161, frames), torch.randint(29, (n, frames // 2))),
        loss=_words,
        optimizer=lambda p: torch.optim.SGD(p, 1e-4, momentum=0.9),
        size=2 if small else 4,
    )


def _recommendation(small: bool) -> Job:
    users, items, width = (1000, 500, 8) if small else (138_493, 26_744, 64)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.stack((torch.randint(users, (n,)), torch.randint(items, (n,))), -1), torch.rand(n)

    return Job(
        model=lambda: networks.Recommender(users, items, width),
        batch=batch,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=torch.optim.Adam,
        size=256 if small else 65_536,
    )


def _reinforcement(small: bool) -> Job:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        policy, value = output[:, :-1].float().log_softmax(-1), output[:, -1].float()
        gain = (target - value).detach()
        entropy = -(policy.exp() * policy).sum(-1).mean()
        return -(policy[:, 0] * gain).mean() + 0.5 * F.mse_loss(value, target) - 0.01 * entropy

    return Job(
        model=networks.ActorCritic,
        batch=lambda n: (torch.rand(n, 4, 84, 84), torch.randn(n)),
        loss=loss,
        optimizer=lambda p: torch.optim.RMSprop(p, 1e-4),
        size=8 if small else 256,
    )


def _gan(small: bool) -> Job:
    def loss(output: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        made, real = output
        return real.mean() - made.mean()

    return Job(
        model=lambda: networks.Adversaries(8 if small else 64),
        batch=lambda n: ((torch.randn(n, 100, 1, 1), torch.randn(n, 3, 64, 64)), torch.zeros(n)),
        loss=loss,
        optimizer=lambda p: torch.optim.RMSprop(p, 5e-5),
        size=4 if small else 128,
    )


def _language(small: bool) -> Job:
    width, layers, words, length = (64, 2, 1000, 32) if small else (768, 12, 30522, 128)
    return Job(
        model=lambda: networks.LanguageModel(width, layers, words, length),
        batch=lambda n: (torch.randint(words, (n, length)), torch.randint(words, (n, length))),
        loss=_words,
        optimizer=torch.optim.AdamW,
        size=2 if small else 32,
    )


FAMILIES: dict[str, Callable[[bool], Job]] = {
    "image classification": _images,
    "object detection": _detection,
    "translation": _translation,
    "speech recognition": _speech,
    "recommendation": _recommendation,
    "reinforcement learning": _reinforcement,
    "adversarial network": _gan,
    "language modelling": _language,
}
"""By name: a job, reduced if asked."""


def family(name: str, *, reduced: bool = False) -> Job:
    """The job of a family; a part of its name is enough.

    >>> family("speech", reduced=True).size
    2

    Raises:
        JobError: there is none; names those that are.
    """
    from dataclasses import replace

    found = [known for known in FAMILIES if name.lower() in known]
    if len(found) != 1 or not name:
        raise JobError(f"no family {name!r}; {suggest(name, FAMILIES)}")
    made: Any = replace(FAMILIES[found[0]](reduced), name=found[0])
    job: Job = made
    return job
