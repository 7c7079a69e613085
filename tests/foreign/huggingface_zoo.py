"""Hugging Face: vision models from small configurations, beside the language and speech ones."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .foreign import Call, Foreign, floats, integers
from .huggingface_model import model
from .huggingface_text import TEXT


def _pixels(size: int) -> Callable[[int], Call]:
    return lambda batch: ((), {"pixel_values": floats(batch, 3, size, size)})


def _mapped(size: int, classes: int) -> Callable[[int], Call]:
    """Images with a map of labels."""
    return lambda batch: (
        (),
        {"pixel_values": floats(batch, 3, size, size), "labels": integers(classes, batch, size, size)},
    )


def _boxed(batch: int) -> Call:
    """Images with one object each; the loss matches objects to queries on the host."""
    boxes = integers(8, batch, 1, 4, low=3).float() / 16
    labels = [{"class_labels": integers(4, 1, seed=i), "boxes": boxes[i]} for i in range(batch)]
    return (), {"pixel_values": floats(batch, 3, 64, 64), "labels": labels}


_PATCHED: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_MASKED = _PATCHED | {
    "decoder_hidden_size": 32,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 4,
    "decoder_intermediate_size": 64,
}
_SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
_SEGFORMER = {
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 4, 4],
    "decoder_hidden_size": 32,
    "num_labels": 5,
}
_MOBILE = {"image_size": 64, "depth_multiplier": 0.35}


def _upernet() -> nn.Module:
    from transformers import ConvNextConfig, UperNetConfig, UperNetForSemanticSegmentation

    backbone = ConvNextConfig(**_STAGES, out_features=["stage1", "stage2", "stage3", "stage4"])
    config = UperNetConfig(backbone_config=backbone, hidden_size=32, num_labels=5, auxiliary_in_channels=48)
    return UperNetForSemanticSegmentation(config)


def _detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(embedding_size=16, **_STAGES, layer_type="basic", out_features=["stage4"])
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=10,
        num_labels=4,
    )
    return DetrForObjectDetection(config)


_VISION: tuple[Foreign, ...] = (
    model("vit", "ViTForImageClassification", _pixels(32), **_PATCHED),
    model("vit_mae", "ViTMAEForPreTraining", _pixels(32), **_MASKED),  # masks patches by noise drawn in forward
    model("deit", "DeiTModel", _pixels(32), **_PATCHED),
    model("dinov2", "Dinov2Model", _pixels(32), **_PATCHED, drop_path_rate=0.2),
    model("beit", "BeitModel", _pixels(32), **_PATCHED, use_relative_position_bias=True),
    model("swin", "SwinModel", _pixels(32), **_SWIN),
    model("swinv2", "Swinv2Model", _pixels(32), **_SWIN),
    model("convnext", "ConvNextModel", _pixels(64), **_STAGES, drop_path_rate=0.1),
    model("convnextv2", "ConvNextV2Model", _pixels(64), **_STAGES),
    model("resnet", "ResNetForImageClassification", _pixels(64), **_STAGES, embedding_size=16),
    model("regnet", "RegNetModel", _pixels(64), **_STAGES, embedding_size=16, groups_width=8),
    model("mobilenet_v2", "MobileNetV2Model", _pixels(64), **_MOBILE),
    model(
        "efficientnet",
        "EfficientNetModel",
        _pixels(64),
        image_size=64,
        width_coefficient=0.5,
        depth_coefficient=0.5,
        hidden_dim=640,
    ),
    model("segformer", "SegformerForSemanticSegmentation", _mapped(64, 5), **_SEGFORMER),
    Foreign("hf/upernet", _upernet, _mapped(64, 5), True),
    Foreign("hf/detr", _detr, lambda batch: ((), {"pixel_values": floats(batch, 3, 64, 64)}), True),
    Foreign("hf/detr_loss", _detr, _boxed, True),
)

HUGGINGFACE: tuple[Foreign, ...] = _VISION + TEXT
