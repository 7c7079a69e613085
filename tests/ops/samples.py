"""A call of every operation of the catalogue that can be called with a few numbers, made from torch's own functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outcore.ops import operations

IMAGES = {1: (2, 4, 12), 2: (2, 4, 8, 6), 3: (1, 4, 6, 4, 6)}
_TWO = "add sub mul div maximum minimum pow atan2 fmod remainder logaddexp floor_divide true_divide".split()
_TWO += "eq ne lt le gt ge logical_and logical_or divide multiply subtract".split()
_OPERATORS: dict[str, Callable[..., Any]] = {
    "and": lambda x: (x > 0) & (x < 1),
    "or": lambda x: (x > 0) | (x < 1),
    "xor": lambda x: (x > 0) ^ (x < 1),
    "invert": lambda x: ~(x > 0),
    "mod": lambda x: x % 2.0,
    "floordiv": lambda x: x // 2.0,
    "truediv": lambda x: x / 3.0,
    "radd": lambda x: 1.0 + x,
    "rsub": lambda x: 1.0 - x,
    "rmul": lambda x: 2.0 * x,
    "rpow": lambda x: 2.0**x,
    "getitem": lambda x: x[1:, ..., 0],
    "setitem": lambda x: operator.setitem(x.clone(), 0, 1.0),
    "truediv_": lambda x: operator.itruediv(x * 1, 3.0),
    "iadd": lambda x: operator.iadd(x * 1, 3.0),
    "rdiv": lambda x: x.__rdiv__(1.0),
    "rtruediv": lambda x: x.__rtruediv__(1.0),
    "matmul": lambda x: x @ x.mT,
}
_ARGUMENTS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    **dict.fromkeys(_TWO, lambda x: (x, x * 0.5 + 0.25)),
    **dict.fromkeys((f"{name}_" for name in ("add", "sub", "mul", "div", "pow")), lambda x: (x, 1.5)),
    **dict.fromkeys(("clamp", "clip", "clamp_", "hardtanh", "hardtanh_"), lambda x: (x, 0.2, 0.9)),
    **dict.fromkeys(("clamp_min", "clamp_max", "clamp_min_", "clamp_max_"), lambda x: (x, 0.5)),
    **dict.fromkeys(("addcmul", "addcdiv"), lambda x: (x, x + 1, x + 2)),
    **dict.fromkeys(("threshold", "threshold_"), lambda x: (x, 0.5, 0.1)),
    **dict.fromkeys(("masked_fill", "masked_fill_"), lambda x: (x, x > 0.5, 0.0)),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "glu", "cumsum", "cumprod", "logsumexp"), lambda x: (x, 1)),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack", "hstack", "vstack"), lambda x: ([x, x + 1],)),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "movedim", "moveaxis"), lambda x: (x, 0, 1)),
    **dict.fromkeys(("chunk", "tensor_split", "split", "split_with_sizes"), lambda x: (x, 2)),
    **dict.fromkeys(("view_as", "reshape_as", "expand_as", "type_as"), lambda x: (x, x * 0.5)),
    **dict.fromkeys(("squeeze", "unsqueeze", "unbind"), lambda x: (x, 0)),
    "flip": lambda x: (x, (0,)),
    "copy_": lambda x: (x, x * 0.5),
    **dict.fromkeys(("view", "reshape"), lambda x: (x, (-1,))),
    **dict.fromkeys(("expand", "broadcast_to"), lambda x: (x, (2, *x.shape))),
    **dict.fromkeys(("repeat", "tile"), lambda x: (x, (2,) * x.dim())),
    "gather": lambda x: (x, 0, _index(x)),
    "take_along_dim": lambda x: (x, _index(x), 0),
    "index_select": lambda x: (x, 0, torch.tensor([1, 0])),
    "where": lambda x: (x > 0.5, x, x + 1),
    "lerp": lambda x: (x, x + 1, 0.3),
    "split_with_sizes": lambda x: (x, [1, x.shape[0] - 1]),
    "unflatten": lambda x: (x, 1, (2, -1)),
    "permute": lambda x: (x, tuple(reversed(range(x.dim())))),
    "narrow": lambda x: (x, 0, 0, 1),
    "select": lambda x: (x, 0, 1),
    "as_strided": lambda x: (x, (2, 2), (1, 2)),
    "unfold": lambda x: (x, 1, 2, 1),
    "roll": lambda x: (x, 1, 0),
    "to": lambda x: (x, torch.float64),
    "type": lambda x: (x, torch.float64),
    "pad": lambda x: (x, (1, 1)),
    "interpolate": lambda x: (x, None, 2),
    "upsample": lambda x: (x, None, 2),
    "pixel_shuffle": lambda x: (x, 2),
    "pixel_unshuffle": lambda x: (x, 2),
    "channel_shuffle": lambda x: (x, 2),
    "normalize": lambda x: (x,),
    "group_norm": lambda x: (x, 2),
    "layer_norm": lambda x: (x, x.shape[1:]),
    "rms_norm": lambda x: (x, x.shape[1:]),
    "local_response_norm": lambda x: (x, 2),
    "prelu": lambda x: (x, torch.full((1,), 0.1, dtype=x.dtype)),
    "full_like": lambda x: (x, 2.0),
    "cosine_similarity": lambda x: (x, x + 1),
    "outer": lambda x: (x.flatten(), x.flatten()),
    "mv": lambda x: (x.flatten(1), x.flatten(1)[0]),
    "dot": lambda x: (x.flatten(), x.flatten()),
    "mm": lambda x: (x.flatten(1), x.flatten(1).T),
    "bmm": lambda x: (x.flatten(2), x.flatten(2).mT),
    "baddbmm": lambda x: (x.new_ones(1), x.flatten(2), x.flatten(2).mT),
    "addmm": lambda x: (x.new_ones(1), x.flatten(1), x.flatten(1).T),
    "einsum": lambda x: ("a...,a...->a", x, x),
    "linear": lambda x: (x, x.new_ones(3, x.shape[-1])),
    "scaled_dot_product_attention": lambda x: (x, x, x),
    "alpha_dropout": lambda x: (x, 0.5, True),
    "feature_alpha_dropout": lambda x: (x, 0.5, True),
    "feature_dropout": lambda x: (x, 0.5, True),
    "alpha_dropout_": lambda x: (x, 0.5, True),
    "dropout_": lambda x: (x, 0.5, True),
    **dict.fromkeys(("T", "mT", "H", "mH", "real", "data"), lambda x: (x,)),
    **{f"{a}avg_pool{n}d": (lambda x: (x, 2)) for a in ("", "adaptive_") for n in (1, 2, 3)},
    **{f"{a}max_pool{n}d": (lambda x: (x, 2)) for a in ("", "adaptive_") for n in (1, 2, 3)},
    **{f"lp_pool{n}d": (lambda x: (x, 2.0, 2)) for n in (1, 2, 3)},
    **{f"conv{n}d": (lambda x: (x, torch.ones(3, 4, *[2] * (x.dim() - 2), dtype=x.dtype))) for n in (1, 2, 3)},
    **{
        f"conv_transpose{n}d": (lambda x: (x, torch.ones(4, 3, *[2] * (x.dim() - 2), dtype=x.dtype))) for n in (1, 2, 3)
    },
}
_MATRICES = {"t", "T", "H", "mH", "addmm", "tril", "triu"}
_NOT_CALLED = (
    "rmatmul matmul_ rfloordiv rmod rnn_cell lstm_cell gru_cell identity transposed_linear swish bilinear imag "
    "alias slice iadd size diagonal meshgrid fold affine_grid grid_sample requires_grad_ softmax2d pow_ "
    "multi_head_attention_forward instance_norm batch_norm sync_batch_norm embedding embedding_bag"
).split()
"""Made by hand elsewhere, or only the name of a class."""


def _index(x: Tensor) -> Tensor:
    return torch.zeros((1, *x.shape[1:]), dtype=torch.long)


@dataclass(frozen=True)
class Sample:
    """One call under one name of an operation."""

    operation: str
    name: str
    call: Callable[[Tensor], Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return self.name


def samples() -> Iterator[Sample]:
    """Calls of all functions and methods of which a call can be made from one tensor of numbers in (0, 1)."""
    skipped = {"new tensor", "creation", "random", "loss", "packing", "shape", "recurrent", "unpool", "random pool"}
    for op in operations():
        if op.kind in skipped or op.name in _NOT_CALLED:
            continue
        for name in (*op.functions, *op.in_place):
            call = _OPERATORS.get(name) or _called(name)
            if name not in _NOT_CALLED and call is not None:
                yield Sample(op.name, name, call, (4, 6) if name in _MATRICES else IMAGES[op.dims or 2])


def _called(name: str) -> Callable[[Tensor], Any] | None:
    function = next((getattr(o, name) for o in (F, torch, Tensor) if callable(getattr(o, name, None))), None)
    if function is None and not hasattr(Tensor, name):
        return None
    arguments = _ARGUMENTS.get(name, lambda x: (x,))

    def call(x: Tensor) -> Any:
        first, *rest = arguments(x * 1 if name.endswith("_") else x)
        return getattr(first, name) if function is None else function(first, *rest)

    return call
