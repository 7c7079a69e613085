"""Names of operations that treat the rows of a matrix one by one, or add something up over all of them.

The planner finds by them where a last layer and its loss can run in chunks (`outcore.planner.memory.chunked_region`),
and the runtime knows by the same names what it may do lazily (`outcore.memory.chunked_loss`).
"""

from __future__ import annotations

HEADS = frozenset({"Linear", "linear"})
"""Products with a weight: what begins a region."""
RESHAPING = frozenset(
    {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "view_as", "alias"}
)
PERMUTING = frozenset({"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "mT"})
INDEXING = frozenset({"getitem", "narrow", "select"})
CASTS = frozenset({"float", "double", "half", "bfloat16", "to", "type"})
SCALING = frozenset({"mul", "div", "truediv", "true_divide", "add", "sub", "multiply", "divide", "rmul", "radd"})
ACTIVATIONS = frozenset(
    {"tanh", "sigmoid", "relu", "gelu", "silu", "exp", "neg", "softplus", "logsigmoid", "square", "abs", "clamp"}
)
SOFTMAX = frozenset({"softmax", "log_softmax"})
ROW_WISE = RESHAPING | PERMUTING | INDEXING | CASTS | SCALING | ACTIVATIONS | SOFTMAX | {"detach"}
SUMS = frozenset(
    {
        "cross_entropy",
        "nll_loss",
        "binary_cross_entropy_with_logits",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "kl_div",
        "sum",
        "mean",
    }
)
"""Sums and means over all rows."""
PER_ROW = frozenset({"argmax", "argmin", "logsumexp", "amax", "amin", "gather"})
"""What leaves a few numbers of every row."""
MODULES = {
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "KLDivLoss": "kl_div",
    "LogSoftmax": "log_softmax",
    "Softmax": "softmax",
    "Flatten": "flatten",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
}
"""Layers that call one of these functions."""
