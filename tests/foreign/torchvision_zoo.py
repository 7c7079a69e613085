"""torchvision: every family of its classifiers, its segmentation networks and its video networks."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .foreign import Foreign, one_tensor


def _model(family: str, function: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        module = getattr(torchvision.models, family) if family else torchvision.models
        return getattr(module, function)(weights=None, **options)

    return build


def _image(function: str, size: int, *, name: str = "", quick: bool = True, **options: Any) -> Foreign:
    build = _model("", function, num_classes=10, **options)
    return Foreign(f"torchvision/{name or function}", build, one_tensor(3, size, size), quick)


def _segment(function: str, size: int, *, quick: bool = True, **options: Any) -> Foreign:
    build = _model("segmentation", function, weights_backbone=None, num_classes=5, **options)
    return Foreign(f"torchvision/{function}", build, one_tensor(3, size, size), quick)


def _video(function: str, frames: int, size: int, *, quick: bool = True, **options: Any) -> Foreign:
    build = _model("video", function, num_classes=10, **options)
    return Foreign(f"torchvision/{function}", build, one_tensor(3, frames, size, size), quick)


def _mvit() -> nn.Module:
    """mvit_v2_s with 5 of its 16 blocks; its own function fixes the input at 16 frames of 224 px."""
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(1, 96, 96, (3, 3, 3), (3, 3, 3), (1, 1, 1), (1, 8, 8)),
        MSBlockConfig(2, 96, 192, (3, 3, 3), (3, 3, 3), (1, 2, 2), (1, 4, 4)),
        MSBlockConfig(2, 192, 192, (3, 3, 3), (3, 3, 3), (1, 1, 1), (1, 4, 4)),
        MSBlockConfig(4, 192, 384, (3, 3, 3), (3, 3, 3), (1, 2, 2), (1, 2, 2)),
        MSBlockConfig(4, 384, 384, (3, 3, 3), (3, 3, 3), (1, 1, 1), (1, 2, 2)),
    ]
    return MViT(
        spatial_size=(64, 64),
        temporal_size=8,
        block_setting=blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        stochastic_depth_prob=0.2,
        num_classes=10,
    )


TORCHVISION: tuple[Foreign, ...] = (
    _image("alexnet", 64, quick=False),  # 57 and 129 million weights, most in the first linear layer
    _image("vgg11_bn", 32, quick=False),
    _image("resnet18", 64),
    _image("resnet50", 64),
    _image("resnext50_32x4d", 64),
    _image("wide_resnet50_2", 64, quick=False),
    _image("densenet121", 64),
    # each dense layer runs under torch.utils.checkpoint
    _image("densenet121", 64, name="densenet121_checkpointed", memory_efficient=True),
    # the auxiliary classifier needs the full 299 px; without it 75 are enough
    _image("inception_v3", 299, quick=False, init_weights=True),
    _image("inception_v3", 96, name="inception_v3_plain", aux_logits=False, init_weights=True),
    _image("googlenet", 64, init_weights=True),
    _image("squeezenet1_1", 64),
    _image("mobilenet_v2", 64),
    _image("mobilenet_v3_small", 64),
    _image("shufflenet_v2_x0_5", 64),
    _image("mnasnet0_5", 64),
    _image("efficientnet_b0", 64),  # stochastic depth: one draw per sample
    _image("efficientnet_v2_s", 64),
    _image("regnet_y_400mf", 64),
    _image("regnet_x_400mf", 64),
    _image("convnext_tiny", 64),
    _image("vit_b_16", 32, quick=False, image_size=32),
    _image("swin_t", 64),
    _image("swin_v2_t", 64),
    _image("maxvit_t", 224, quick=False),  # its windows of 7 ask for 224 px
    _segment("fcn_resnet50", 64, aux_loss=True),
    _segment("deeplabv3_resnet50", 64),
    _segment("deeplabv3_mobilenet_v3_large", 64),
    _segment("lraspp_mobilenet_v3_large", 64),
    _video("r3d_18", 4, 32),
    _video("mc3_18", 4, 32),
    _video("r2plus1d_18", 4, 32),
    _video("s3d", 16, 209, quick=False),  # its last pool asks for 7 x 7
    Foreign("torchvision/mvit_v2", _mvit, one_tensor(3, 8, 64, 64), True),
    _video("swin3d_t", 4, 64),
)
