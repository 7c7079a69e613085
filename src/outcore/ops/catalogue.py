"""The operations outcore has a name for, by kind: what a recorded call may be.

A row is one operation with all names under which it is recorded, the first of which is its own: functions and methods,
their in-place forms (which end in ``_``), reflected operators (``radd``), layers of torch.nn (with a capital), and with
``aten.`` before them the operations below autograd that it becomes, where they are called otherwise. To make outcore
know one more operation, add it here; what is known of it is added where that knowledge is (`outcore.ops.registry`).
"""

from __future__ import annotations

from collections.abc import Mapping

_BORDERS = ("Zero", "Constant", "Reflection", "Replication", "Circular")


def _each(row: str, dims: str = "123") -> str:
    """A row for every number of spatial dimensions."""
    return " ".join(row.replace("#", n) for n in dims)


CATALOGUE: Mapping[str, str] = {
    "convolution": _each("conv#d/Conv#d/aten.convolution"),
    "transposed convolution": _each("conv_transpose#d/ConvTranspose#d"),
    "linear": """linear/Linear/NonDynamicallyQuantizableLinear/aten.addmm transposed_linear/Conv1D bilinear/Bilinear""",
    "matrix product": "matmul/matmul_ rmatmul mm bmm baddbmm addmm mv dot einsum outer",
    "attention": "scaled_dot_product_attention multi_head_attention_forward/MultiheadAttention",
    "recurrent": "rnn/RNN lstm/LSTM gru/GRU",
    "recurrent cell": "rnn_cell/RNNCell lstm_cell/LSTMCell gru_cell/GRUCell",
    "norm with statistics": """batch_norm/BatchNorm1d/BatchNorm2d/BatchNorm3d sync_batch_norm/SyncBatchNorm
        instance_norm/InstanceNorm1d/InstanceNorm2d/InstanceNorm3d""",
    "norm": """layer_norm/LayerNorm group_norm/GroupNorm rms_norm/RMSNorm local_response_norm/LocalResponseNorm
        normalize""",
    "max pool": _each("max_pool#d/MaxPool#d"),
    "average pool": _each("avg_pool#d/AvgPool#d"),
    "adaptive average pool": _each("adaptive_avg_pool#d/AdaptiveAvgPool#d"),
    "adaptive max pool": _each("adaptive_max_pool#d/AdaptiveMaxPool#d"),
    "power-average pool": _each("lp_pool#d/LPPool#d"),
    "random pool": _each("fractional_max_pool#d/FractionalMaxPool#d", "23"),
    "unpool": _each("max_unpool#d/MaxUnpool#d"),
    "activation": """relu/relu_/ReLU relu6/ReLU6 leaky_relu/leaky_relu_/LeakyReLU elu/elu_/ELU selu/selu_/SELU
        celu/celu_/CELU gelu/GELU silu/silu_/SiLU/swish mish/Mish hardswish/hardswish_/Hardswish
        hardsigmoid/Hardsigmoid hardtanh/hardtanh_/Hardtanh sigmoid/sigmoid_/Sigmoid logsigmoid/log_sigmoid/LogSigmoid
        tanh/tanh_/Tanh softplus/Softplus softsign/Softsign softshrink/Softshrink hardshrink/Hardshrink
        tanhshrink/Tanhshrink threshold/threshold_/Threshold""",
    "activation with a weight": "prelu/PReLU",
    "random activation": "rrelu/rrelu_/RReLU",
    "gated activation": "glu/GLU",
    "softmax": "softmax/Softmax log_softmax/LogSoftmax softmin/Softmin softmax2d/Softmax2d",
    "sum": "add/add_/radd/iadd sub/sub_/rsub/subtract",
    "product": """mul/mul_/rmul/multiply div/div_/truediv/truediv_/rdiv/rtruediv/divide/true_divide
        addcmul addcdiv lerp""",
    "arithmetic": """floor_divide/floordiv/rfloordiv pow/pow_/rpow remainder/mod/rmod fmod neg/neg_ positive abs/abs_
        exp/exp_ exp2 expm1 log/log_ log2 log10 log1p sqrt/sqrt_ rsqrt square reciprocal sin cos tan asin acos atan sinh
        cosh atan2 erf erfc sign round floor/floor_ ceil/ceil_ trunc clamp/clamp_/clip clamp_min/clamp_min_
        clamp_max/clamp_max_ maximum minimum logaddexp nan_to_num""",
    "selection": "where masked_fill/masked_fill_",
    "comparison": """eq ne lt le gt ge logical_and logical_or logical_not and or xor invert isnan isinf isfinite""",
    "cast": "to type type_as float half bfloat16 double long int bool",
    "copy": "clone contiguous",
    "identity": "identity/Identity",
    "detaching": "detach data requires_grad_",
    "view": """view/aten._unsafe_view reshape view_as reshape_as flatten/Flatten unflatten/Unflatten ravel transpose
        permute movedim/moveaxis t T mT H mH swapaxes swapdims squeeze unsqueeze expand expand_as broadcast_to narrow
        select slice getitem split/split_with_sizes tensor_split chunk unbind diagonal as_strided real imag alias""",
    "window": "unfold/Unfold fold/Fold",
    "join": "cat/concat/concatenate stack hstack vstack",
    "rearrangement": "repeat tile roll flip",
    "pad": "/".join(("pad", *(f"{border}Pad{n}d" for border in _BORDERS for n in (1, 2, 3)))),
    "resampling": "interpolate/upsample/Upsample/UpsamplingNearest2d/UpsamplingBilinear2d grid_sample affine_grid",
    "shuffle": """pixel_shuffle/PixelShuffle pixel_unshuffle/PixelUnshuffle channel_shuffle/ChannelShuffle""",
    "cumulative sum": "cumsum cumprod",
    "reduction": "mean sum prod var std var_mean norm amax amin logsumexp",
    "extreme": "max min",
    "search": "argmax argmin",
    "embedding": "embedding/Embedding embedding_bag/EmbeddingBag",
    "indexing": "gather index_select take_along_dim tril triu",
    "writing": "copy_ setitem",
    "dropout": "dropout/dropout_/Dropout " + _each("dropout#d/Dropout#d"),
    "alpha dropout": """alpha_dropout/alpha_dropout_/AlphaDropout feature_alpha_dropout/FeatureAlphaDropout
        feature_dropout""",
    "random": """rand randn randint randperm normal/normal_ bernoulli/bernoulli_ multinomial poisson rand_like
        randn_like randint_like gumbel_softmax uniform_ exponential_ random_ geometric_ log_normal_ cauchy_""",
    "creation": "zeros ones full arange linspace eye tensor as_tensor meshgrid zeros_like ones_like full_like",
    "new tensor": "empty empty_like new_empty new_zeros new_ones new_full new_tensor",
    "loss": """cross_entropy/CrossEntropyLoss nll_loss/NLLLoss mse_loss/MSELoss l1_loss/L1Loss
        binary_cross_entropy_with_logits/BCEWithLogitsLoss""",
    "distance": "cosine_similarity/CosineSimilarity",
    "packing": "pack_padded_sequence pad_packed_sequence",
    "shape": "size",
}
"""Kind of operation -> its operations."""
