"""MONAI: classification, registration and generative networks beside its segmentation ones."""

from typing import Any

from .foreign import Call, Foreign, floats, integers, one_tensor
from .monai_network import network, plane, volume
from .monai_segmentation import SEGMENTATION

_LEVELS = {"channels": (8, 16, 32), "strides": (2, 2, 2)}
_RESNET = {"n_input_channels": 1, "num_classes": 4}
_VIT: dict[str, Any] = {"in_channels": 1, "hidden_size": 48, "mlp_dim": 96, "num_layers": 3, "num_heads": 4}
_BAG = one_tensor(4, 3, 64, 64)  # patches of one slide: (batch, patches, 3, height, width)
_MIL = {"num_classes": 2, "pretrained": False}

_CLASSIFICATION: tuple[Foreign, ...] = (
    network(
        "DenseNet121",
        plane(64),
        name="DenseNet121_2d",
        spatial_dims=2,
        in_channels=1,
        out_channels=4,
        dropout_prob=0.1,
    ),
    network("DenseNet121", volume(32), name="DenseNet121_3d", spatial_dims=3, in_channels=1, out_channels=4),
    # drop-connect keeps or drops whole samples
    network("EfficientNetBN", plane(64, 3), model_name="efficientnet-b0", pretrained=False, num_classes=4),
    network("resnet18", plane(64), name="resnet18_2d", spatial_dims=2, **_RESNET),
    network("resnet18", volume(16), name="resnet18_3d", spatial_dims=3, **_RESNET),
    network("resnet50", volume(16), name="resnet50_3d", spatial_dims=3, **_RESNET, quick=False),
    network("SEResNet50", plane(64), spatial_dims=2, in_channels=1, num_classes=4),
    network("Regressor", plane(32), in_shape=(1, 32, 32), out_shape=(3,), **_LEVELS),
    network("Discriminator", plane(32), in_shape=(1, 32, 32), **_LEVELS),
    network("PatchDiscriminator", plane(64), spatial_dims=2, channels=8, in_channels=1, num_layers_d=2),
    network("ViT", volume(32), **_VIT, img_size=32, patch_size=8, classification=True, dropout_rate=0.1),
    network("MILModel", _BAG, name="MILModel_attention", mil_mode="att", backbone="resnet18", **_MIL),
    network("MILModel", _BAG, name="MILModel_pyramid", mil_mode="att_trans_pyramid", quick=False, **_MIL),
)


def _pair(batch: int) -> Call:
    return (floats(batch, 1, 32, 32, 32), floats(batch, 1, 32, 32, 32, seed=1)), {}


_REGISTER = {"in_channels": 2, "num_channel_initial": 8}
_MORPH = {"unet_out_channels": 8, "channels": (8, 16, 16, 16, 16, 16), "final_conv_channels": (8, 8)}

_REGISTRATION: tuple[Foreign, ...] = (
    network("RegUNet", plane(32, 2), **_REGISTER, spatial_dims=2, depth=3, out_channels=2),
    network("LocalNet", plane(32, 2), **_REGISTER, spatial_dims=2, extract_levels=(0, 1, 2, 3), out_channels=2),
    network("GlobalNet", volume(32, 2), **_REGISTER, spatial_dims=3, depth=4, image_size=[32] * 3),
    network("VoxelMorphUNet", volume(32, 2), **_MORPH, spatial_dims=3, in_channels=2),
    network("VoxelMorph", _pair, spatial_dims=3, integration_steps=3, half_res=True),  # warps by grid_sample
)


def _diffusion(batch: int) -> Call:
    return (floats(batch, 1, 32, 32), integers(1000, batch)), {"context": floats(batch, 3, 8, seed=1)}


def _labelled(batch: int) -> Call:
    return (integers(2, batch, 3, 32, 32).float(), floats(batch, 1, 32, 32)), {}


def _tokens(batch: int) -> Call:
    return (integers(32, batch, 16),), {}


_IMAGE = {"spatial_dims": 2, "in_channels": 1, "out_channels": 1}
_LATENT = {"channels": (8, 16, 16), "num_res_blocks": 1, "norm_num_groups": 4}
_QUANTISED = {
    "channels": (16, 16),
    "num_res_channels": (16, 16),
    "num_res_layers": 1,
    "downsample_parameters": ((2, 4, 1, 1),) * 2,
    "upsample_parameters": ((2, 4, 1, 1, 0),) * 2,
    "num_embeddings": 16,
    "embedding_dim": 8,
}
_MASKED = {
    "decoder_hidden_size": 32,
    "decoder_mlp_dim": 64,
    "decoder_num_layers": 2,
    "decoder_num_heads": 4,
}
_CONDITIONED = {"with_conditioning": True, "cross_attention_dim": 8, "num_head_channels": 8}
_SPADE = {
    "label_nc": 3,
    "input_shape": (32, 32),
    "channels": [16, 8],
    "z_dim": 8,
    "spade_intermediate_channels": 8,
}
_DECODER = {"attn_layers_dim": 32, "attn_layers_depth": 2, "attn_layers_heads": 4}

_GENERATION: tuple[Foreign, ...] = (
    network("AutoEncoder", plane(64), **_IMAGE, **_LEVELS, inter_channels=[32, 32], inter_dilations=[1, 2]),
    # samples its latent in train mode; in eval mode too without use_mean_at_inference, in place on what
    # backward needs, so that backward then fails
    network(
        "VarAutoEncoder",
        plane(32),
        spatial_dims=2,
        in_shape=(1, 32, 32),
        out_channels=1,
        latent_size=8,
        use_mean_at_inference=True,
        **_LEVELS,
    ),
    network("Generator", one_tensor(10), latent_shape=(10,), start_shape=(16, 4, 4), **_LEVELS, dropout=0.1),
    network("ViTAutoEnc", volume(16), **_VIT, img_size=16, patch_size=4),
    # which patches are masked is drawn in forward: argsort of noise, then gather
    network("MaskedAutoEncoderViT", plane(32), **_VIT, **_MASKED, spatial_dims=2, img_size=32, patch_size=8),
    # samples its latent in every forward
    network("AutoencoderKL", plane(32), **_IMAGE, **_LATENT, attention_levels=(False, False, True)),
    # train mode moves its codebook, a buffer, inside forward
    network("VQVAE", plane(32), **_IMAGE, **_QUANTISED),
    network(
        "DiffusionModelUNet",
        _diffusion,
        **_IMAGE,
        **_LATENT,
        **_CONDITIONED,
        attention_levels=(False, True, True),
    ),
    network("SPADENet", _labelled, **_IMAGE, **_SPADE),  # samples its latent in every forward
    network(
        "DecoderOnlyTransformer",
        _tokens,
        **_DECODER,
        num_tokens=32,
        max_seq_len=16,
        embedding_dropout_rate=0.1,
    ),
)

MONAI: tuple[Foreign, ...] = SEGMENTATION + _CLASSIFICATION + _REGISTRATION + _GENERATION
