"""Which operations can be run again in backward, and what their backward really needs of what it keeps.

Running an operation a second time gives the same numbers if it reads nothing but its arguments and parameters. Two
kinds of exceptions can be handled: one that keeps *statistics* runs again without writing them, and a *random* one
with the generator put back to where it was. Whatever is not named here is opaque and is never run again.

Of what autograd keeps, backward often needs less than the numbers: ReLU only where the output is above zero, a pool
only the shape of its input, a convolution whose weights are frozen nothing of its input but the shape.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["Again", "Need", "again", "need"]

Again = Literal["pure", "statistics", "random"]
Need = Literal["full", "sign", "shape"]

_ACTIVATIONS = (
    "ReLU ReLU6 LeakyReLU PReLU ELU CELU SELU GELU SiLU Mish Hardswish Hardsigmoid Hardtanh Sigmoid LogSigmoid Tanh "
    "Softplus Softsign Softshrink Hardshrink Tanhshrink Threshold GLU Softmax LogSoftmax Softmax2d Softmin"
)
_LAYERS = (
    "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Linear Bilinear Identity Flatten Unflatten "
    "MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d LPPool1d LPPool2d AdaptiveAvgPool1d AdaptiveAvgPool2d "
    "AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d LayerNorm GroupNorm RMSNorm "
    "LocalResponseNorm Upsample UpsamplingNearest2d UpsamplingBilinear2d PixelShuffle PixelUnshuffle ChannelShuffle "
    "ZeroPad1d ZeroPad2d ZeroPad3d ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d "
    "ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d CircularPad1d CircularPad2d CircularPad3d "
    "Unfold Fold RNNCell LSTMCell GRUCell CosineSimilarity"
)
_FUNCTIONS = (
    "add add_ sub sub_ mul mul_ div div_ true_divide neg neg_ abs exp exp_ log log_ log1p expm1 sqrt rsqrt square "
    "pow reciprocal sin cos tan tanh tanh_ sigmoid sigmoid_ erf relu relu_ relu6 leaky_relu leaky_relu_ prelu elu "
    "elu_ celu selu gelu silu mish hardswish hardsigmoid hardtanh softplus softsign softmax log_softmax softmin glu "
    "threshold maximum minimum max min clamp clamp_ clamp_min clamp_max where masked_fill masked_fill_ lerp addcmul "
    "addcdiv cat concat concatenate stack hstack vstack flatten reshape view view_as unflatten transpose permute "
    "movedim t swapaxes swapdims squeeze unsqueeze expand expand_as repeat tile narrow select slice getitem split "
    "chunk unbind unfold fold roll flip contiguous clone to type_as float half bfloat16 double cumsum mean sum var "
    "std var_mean norm amax amin logsumexp matmul bmm mm mv dot addmm baddbmm einsum outer linear conv1d conv2d "
    "conv3d conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d max_pool3d avg_pool1d "
    "avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d "
    "layer_norm group_norm rms_norm local_response_norm normalize interpolate upsample pixel_shuffle "
    "pixel_unshuffle channel_shuffle pad embedding tril triu gather index_select take_along_dim logical_and "
    "logical_or logical_not eq ne lt le gt ge isnan isfinite zeros_like ones_like full_like zeros ones full arange "
    "linspace eye tensor as_tensor meshgrid radd rsub rmul rtruediv truediv truediv_ pow_ floordiv matmul_ T mT H"
)
_STATISTICS = (
    "BatchNorm1d BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d InstanceNorm3d batch_norm instance_norm"
)
_RANDOM = (
    "Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout dropout dropout1d dropout2d dropout3d "
    "alpha_dropout feature_alpha_dropout bernoulli bernoulli_ rand randn rand_like randn_like normal_ uniform_"
)
_AGAIN: dict[str, Again] = {
    **dict.fromkeys(f"{_ACTIVATIONS} {_LAYERS} {_FUNCTIONS}".split(), "pure"),
    **dict.fromkeys(_STATISTICS.split(), "statistics"),
    **dict.fromkeys(_RANDOM.split(), "random"),
}

_SIGN_OF_OUTPUT = {"ReLU", "relu", "relu_"}
_SHAPE_OF_INPUT = {
    *(f"{m}{n}d" for m in ("MaxPool", "AvgPool", "max_pool", "avg_pool") for n in (2, 3)),
    *("AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
}
_CONVOLUTIONS = {f"{m}{n}d" for m in ("Conv", "conv") for n in (1, 2, 3)}


def again(type_: str) -> Again | None:
    """How an operation is run again; none if it must not be."""
    return _AGAIN.get(type_)


def need(type_: str, role: Literal["input", "output"], *, weights_trained: bool) -> Need:
    """What backward of an operation needs of a value it keeps.

    >>> need("ReLU", "output", weights_trained=False), need("MaxPool2d", "input", weights_trained=False)
    ('sign', 'shape')
    >>> need("Conv2d", "input", weights_trained=True), need("Conv2d", "input", weights_trained=False)
    ('full', 'shape')
    """
    if role == "output" and type_ in _SIGN_OF_OUTPUT:
        return "sign"
    if role == "input" and (type_ in _SHAPE_OF_INPUT or (type_ in _CONVOLUTIONS and not weights_trained)):
        return "shape"
    return "full"
