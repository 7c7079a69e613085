"""timm: blocks that the other libraries do not have."""

from typing import Any

from torch import nn

from .foreign import Foreign, one_tensor


def _model(architecture: str, size: int, *, name: str = "", quick: bool = True, **options: Any) -> Foreign:
    def build() -> nn.Module:
        import timm

        return timm.create_model(architecture, pretrained=False, num_classes=10, **options)

    return Foreign(f"timm/{name or architecture}", build, one_tensor(3, size, size), quick)


TIMM: tuple[Foreign, ...] = (
    _model("convnext_atto", 64, drop_path_rate=0.1),
    _model("efficientnet_lite0", 64, drop_rate=0.2, drop_path_rate=0.1),
    _model("mixnet_s", 64),  # kernels of several sizes in one layer
    _model("coatnet_pico_rw_224", 64, name="coatnet_pico", img_size=64),
    # in eval mode it caches a tensor with its graph: a second backward of one model fails in plain torch
    _model("levit_128s", 64, img_size=64),
    _model("mobilevit_xxs", 64),
    _model("xcit_nano_12_p8_224", 64, name="xcit_nano", img_size=64),  # attention over channels
    _model("resnetv2_50d_gn", 64, name="resnetv2_gn"),
    _model("davit_tiny", 64),
    _model("edgenext_xx_small", 64),
    _model("nfnet_l0", 64, drop_path_rate=0.1),  # convolutions whose weights are standardised in forward
    _model("dm_nfnet_f0", 64, quick=False),
    _model("mixer_s32_224", 64, name="mixer", img_size=64),
    _model("poolformer_s12", 64),
    _model("fastvit_t8", 64),
    _model("hrnet_w18_small", 64),  # four resolutions exchanged again and again
    _model("res2net50_14w_8s", 64),
    _model("skresnet18", 64),
    _model("repvgg_a0", 64),
    _model("pvt_v2_b0", 64),
    _model("halonet26t", 256, name="halonet"),  # overlapping windows by unfold
    _model("sequencer2d_s", 64, img_size=64),  # LSTMs over rows and columns
    _model("hiera_tiny_224", 64, name="hiera_tiny", img_size=64),
)
