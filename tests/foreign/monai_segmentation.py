"""MONAI's segmentation networks: long and dense skips, attention gates, deep supervision, shifted windows."""

from torch import nn

from .foreign import Foreign, one_tensor
from .monai_network import network, plane, remarks_ignored, volume

_LEVELS = {"channels": (8, 16, 32), "strides": (2, 2)}
_FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_DEEP = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_NARROW = (8, 8, 16, 32, 64, 8)
_SHALLOW = {"init_filters": 8, "blocks_down": (1, 2, 2), "dsdepth": 2}
_SWIN = {"feature_size": 12, "num_heads": (1, 2, 2, 4)}
_MEDNEXT = {"init_filters": 8, "kernel_size": 3, "blocks_down": (1, 1, 1, 1), "blocks_up": (1, 1, 1, 1)}
_DYNAMIC = {
    "kernel_size": (3, 3, 3, 3),
    "strides": (1, 2, 2, 2),
    "upsample_kernel_size": (2, 2, 2),
    "filters": (8, 16, 32, 48),
    "res_block": True,
    "deep_supervision": True,
    "deep_supr_num": 2,
}


def _dints() -> nn.Module:
    from monai.networks.nets import DiNTS, TopologyInstance

    with remarks_ignored():
        space = TopologyInstance(spatial_dims=3, channel_mul=0.25, num_blocks=4, num_depths=3)
    return DiNTS(dints_space=space, in_channels=1, num_classes=2, spatial_dims=3)


def _dints_search() -> nn.Module:
    from monai.networks.nets import DiNTS, TopologySearch

    space = TopologySearch(spatial_dims=2, channel_mul=0.25, num_blocks=3, num_depths=3)
    return DiNTS(dints_space=space, in_channels=1, num_classes=2, spatial_dims=2)


SEGMENTATION: tuple[Foreign, ...] = (
    network("UNet", plane(64), name="UNet2d", **_FLAT, **_LEVELS, num_res_units=2, dropout=0.1),
    network("UNet", volume(32), name="UNet3d", **_DEEP, **_LEVELS, num_res_units=2),
    network("BasicUNet", plane(64), name="BasicUNet2d", **_FLAT, features=_NARROW, dropout=0.1),
    network("BasicUNet", volume(32), name="BasicUNet3d", **_DEEP, features=_NARROW, upsample="nontrainable"),
    network("BasicUNetPlusPlus", plane(64), **_FLAT, features=_NARROW, deep_supervision=True),
    network("AttentionUnet", plane(64), name="AttentionUnet2d", **_FLAT, **_LEVELS, dropout=0.1),
    network("AttentionUnet", volume(32), name="AttentionUnet3d", **_DEEP, **_LEVELS),
    # in train mode its heads are stacked into one tensor, in eval mode only the last is returned
    network("DynUNet", volume(32), **_DEEP, **_DYNAMIC),
    network("SegResNet", plane(64), name="SegResNet2d", **_FLAT, init_filters=8, dropout_prob=0.2),
    network("SegResNet", volume(32), name="SegResNet3d", **_DEEP, init_filters=8),
    # draws noise in the middle of forward, and in train mode returns a loss of its own beside the output
    network("SegResNetVAE", volume(32), **_DEEP, input_image_size=(32,) * 3, vae_nz=16, vae_estimate_std=True),
    network("SegResNetDS", volume(32), **_DEEP, **_SHALLOW),
    network("SegResNetDS2", plane(64), **_FLAT, **_SHALLOW),
    network("VNet", plane(32), name="VNet2d", **_FLAT, dropout_dim=2),
    network("VNet", volume(32), name="VNet3d", **_DEEP, quick=False),
    network("HighResNet", plane(48), name="HighResNet2d", **_FLAT),
    network("HighResNet", volume(16), name="HighResNet3d", **_DEEP, dropout_prob=0.1),
    network("AHNet", plane(64, 3), name="AHNet2d", **(_FLAT | {"in_channels": 3}), psp_block_num=2),
    network("AHNet", volume(32), name="AHNet3d", **_DEEP, layers=(1, 1, 1, 1), psp_block_num=2),
    network("FlexibleUNet", plane(64, 3), in_channels=3, out_channels=2, backbone="efficientnet-b0"),
    # valid convolutions and crops; takes 256 px only, 5 GiB and 26 s for a batch of two
    network("HoVerNet", plane(256, 3), quick=False),
    network("MedNeXt", volume(32), **_DEEP, **_MEDNEXT, deep_supervision=True),
    network("Quicknat", plane(64), num_classes=4, num_filters=16, drop_out=0.1),
    network("UNETR", volume(32), **_DEEP, img_size=32, feature_size=8, hidden_size=48, mlp_dim=96, num_heads=4),
    network("SwinUNETR", plane(64), name="SwinUNETR2d", **_FLAT, **_SWIN, dropout_path_rate=0.2),
    # parts run under torch.utils.checkpoint
    network(
        "SwinUNETR",
        one_tensor(1, 64, 32, 32),
        name="SwinUNETR3d",
        **_DEEP,
        **_SWIN,
        use_checkpoint=True,
        quick=False,
    ),
    network("DAF3D", volume(32), in_channels=1, out_channels=2, quick=False),
    Foreign("monai/DiNTS3d", _dints, volume(32), True),
    Foreign("monai/DiNTSSearch2d", _dints_search, plane(64), True),
)
