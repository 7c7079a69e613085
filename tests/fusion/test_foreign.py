"""Models of other libraries, unmodified, in an array: fused, with the gradients of each alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import outcore
from tests.foreign.shim import define_torchvision_operators
from tests.fusion.serial import distance, train_serially

pytestmark = [pytest.mark.slow, pytest.mark.foreign]

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def _bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForSequenceClassification(config)


def _llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, use_cache=False))


def _vit() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, depth=2)


def _convnext() -> nn.Module:
    import timm

    return timm.create_model("convnext_atto", num_classes=3)


def _unet() -> nn.Module:
    import monai

    return monai.networks.nets.UNet(2, 3, 3, (4, 8, 16), (2, 2), num_res_units=1)


def _tokens() -> tuple[Any, Any]:
    ids = torch.randint(1, 50, (2, 6))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}, torch.zeros(1)


def _classified() -> tuple[Any, Any]:
    batch, _ = _tokens()
    return batch | {"labels": torch.tensor([0, 1])}, torch.zeros(1)


def _images() -> tuple[Any, Any]:
    return torch.randn(4, 3, 32, 32).double(), torch.randint(3, (4,))


def _masks() -> tuple[Any, Any]:
    return torch.randn(2, 3, 32, 32).double(), torch.randint(3, (2, 32, 32))


def _own_loss(output: Any, _: Tensor) -> Tensor:
    return output.loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, Any]], Callable[..., Tensor]]] = {
    "transformers BERT": (_bert, _classified, _own_loss),
    "transformers Llama": (_llama, _tokens, _own_loss),
    "timm ViT": (_vit, _images, F.cross_entropy),
    "timm ConvNeXt": (_convnext, _images, F.cross_entropy),
    "MONAI U-Net": (_unet, _masks, F.cross_entropy),
}


@pytest.mark.parametrize("name", MODELS)
def test_foreign_models_train_as_alone(name: str) -> None:
    define_torchvision_operators()
    build, batch, loss = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what these libraries say at import
        models = [build().double().train() for _ in range(2)]
        twins = [copy.deepcopy(m) for m in models]
        batches = [batch() for _ in range(3)]
        array = outcore.fuse(models, loss=loss, optimizer=lambda p, i: optim.SGD(p, 0.01 * (i + 1)))
        for x, y in batches:
            array.step(x, y)
        assert array.way.width == 2, array.notes
        for i, twin in enumerate(twins):
            train_serially(twin, batches, loss, optim.SGD(twin.parameters(), 0.01 * (i + 1)))
            assert distance(dict(twin.state_dict()), array[i].state_dict()) < 1e-10
