"""Every layer and loss of torch.nn, in the variants that fuse differently.

Each case is a layer and what it takes. `Probe` puts a parameter of each member's own in front of the floating-point
inputs, so that every layer sees values that differ from member to member and has a gradient to pass back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

L = 6
"""Length of a spatial dimension."""


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    positive: bool = False
    """Its inputs must be positive."""


class Probe(nn.Module):
    """A layer behind parameters of its own, ending in one number."""

    def __init__(self, layer: nn.Module, inputs: tuple[Any, ...], positive: bool) -> None:
        super().__init__()
        self.layer, self.positive = layer, positive
        floats = [t for t in inputs if isinstance(t, Tensor) and t.is_floating_point()]
        self.gains = nn.ParameterList(nn.Parameter(1 + 0.3 * torch.randn_like(t)) for t in floats)

    def forward(self, *inputs: Any) -> Tensor:
        gains = iter(self.gains)
        given = [t * next(gains) if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs]
        if self.positive:
            given = [t.sigmoid() if isinstance(t, Tensor) and t.is_floating_point() else t for t in given]
        return total(self.layer(*given))


def total(result: Any) -> Tensor:
    """All floating-point tensors of a result in one number that has a gradient everywhere."""
    found = (
        [result]
        if isinstance(result, Tensor)
        else [t for part in result for t in ([part] if isinstance(part, Tensor) else part)]
    )
    parts = [
        (t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape)).sum()
        for t in found
        if t.is_floating_point()
    ]
    return torch.stack(parts).sum()


def _x(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape).double(),)


def _two(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape).double(), torch.randn(*shape).double())


def _classes(n: int, classes: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(n, classes).double(), torch.randint(classes, (n,)))


class _Unpool(nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
        self.unpool = getattr(nn, f"MaxUnpool{dims}d")(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.unpool(*self.pool(x))


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 1)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.decoder(x, memory)


class _Attention(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **settings)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=mask, need_weights=mask is None)[0]


def _space(dims: int) -> tuple[int, ...]:
    return (L,) * dims


CASES: dict[str, Case] = {}
for _d in (1, 2, 3):
    _s = _space(_d)
    for _name, _settings in {
        f"Conv{_d}d": (4, 6, 3),
        f"ConvTranspose{_d}d": (4, 6, 3),
    }.items():
        CASES[_name] = Case(lambda n=_name, a=_settings: getattr(nn, n)(*a), _x(2, 4, *_s))
        CASES[f"{_name}, groups, stride"] = Case(
            lambda n=_name, a=_settings: getattr(nn, n)(*a, stride=2, padding=1, groups=2, bias=False), _x(2, 4, *_s)
        )
    CASES[f"Conv{_d}d, 1x1"] = Case(lambda d=_d: getattr(nn, f"Conv{d}d")(4, 6, 1), _x(2, 4, *_s))
    CASES[f"Conv{_d}d, circular"] = Case(
        lambda d=_d: getattr(nn, f"Conv{d}d")(4, 6, 3, padding=1, padding_mode="circular"), _x(2, 4, *_s)
    )
    CASES[f"Conv{_d}d, same, dilated"] = Case(
        lambda d=_d: getattr(nn, f"Conv{d}d")(4, 6, 3, padding="same", dilation=2), _x(2, 4, *_s)
    )
    CASES[f"Conv{_d}d, no batch"] = Case(lambda d=_d: getattr(nn, f"Conv{d}d")(4, 6, 3), _x(4, *_s))
    CASES[f"BatchNorm{_d}d"] = Case(lambda d=_d: getattr(nn, f"BatchNorm{d}d")(4), _x(3, 4, *_s))
    CASES[f"BatchNorm{_d}d, plain"] = Case(
        lambda d=_d: getattr(nn, f"BatchNorm{d}d")(4, affine=False, track_running_stats=False), _x(3, 4, *_s)
    )
    CASES[f"InstanceNorm{_d}d"] = Case(
        lambda d=_d: getattr(nn, f"InstanceNorm{d}d")(4, affine=True, track_running_stats=True), _x(3, 4, *_s)
    )
    for _kind in ("Max", "Avg", "AdaptiveAvg", "AdaptiveMax", "LP"):
        _args = (2, 2) if _kind == "LP" else (2,)
        CASES[f"{_kind}Pool{_d}d"] = Case(
            lambda n=f"{_kind}Pool{_d}d", a=_args: getattr(nn, n)(*a), _x(2, 4, *_s), positive=_kind == "LP"
        )
    CASES[f"MaxUnpool{_d}d"] = Case(lambda d=_d: _Unpool(d), _x(2, 4, *_s))
    for _kind in ("Circular", "Constant", "Reflection", "Replication", "Zero"):
        _args = (1, 0.5) if _kind == "Constant" else (1,)
        CASES[f"{_kind}Pad{_d}d"] = Case(lambda n=f"{_kind}Pad{_d}d", a=_args: getattr(nn, n)(*a), _x(2, 4, *_s))
    CASES[f"Dropout{_d}d, eval"] = Case(lambda d=_d: getattr(nn, f"Dropout{d}d")().eval(), _x(2, 4, *_s))
CASES |= {
    "BatchNorm1d, rows": Case(lambda: nn.BatchNorm1d(4), _x(5, 4)),
    "BatchNorm2d, cumulative": Case(lambda: nn.BatchNorm2d(4, momentum=None), _x(3, 4, L, L)),
    "SyncBatchNorm": Case(lambda: nn.SyncBatchNorm(4).eval(), _x(3, 4, L, L)),
    "GroupNorm": Case(lambda: nn.GroupNorm(2, 4), _x(2, 4, L)),
    "LayerNorm": Case(lambda: nn.LayerNorm(4), _x(2, 3, 4)),
    "LayerNorm, no bias": Case(lambda: nn.LayerNorm((3, 4), bias=False), _x(2, 3, 4)),
    "RMSNorm": Case(lambda: nn.RMSNorm(4), _x(2, 3, 4)),
    "LocalResponseNorm": Case(lambda: nn.LocalResponseNorm(2), _x(2, 4, L, L)),
    "CrossMapLRN2d": Case(lambda: nn.CrossMapLRN2d(2), _x(2, 4, L, L)),
    "Linear": Case(lambda: nn.Linear(4, 3), _x(2, 4)),
    "Linear, three dims": Case(lambda: nn.Linear(4, 3, bias=False), _x(2, 5, 4)),
    "Linear, one row": Case(lambda: nn.Linear(4, 3), _x(4)),
    "Bilinear": Case(lambda: nn.Bilinear(4, 4, 3), _two(2, 4)),
    "Identity": Case(lambda: nn.Identity(), _x(2, 4)),
    "PReLU": Case(lambda: nn.PReLU(), _x(2, 4, L)),
    "PReLU, per channel": Case(lambda: nn.PReLU(4), _x(2, 4, L)),
    "RReLU": Case(lambda: nn.RReLU(), _x(2, 4)),
    "RReLU, eval": Case(lambda: nn.RReLU().eval(), _x(2, 4)),
    "ReLU, in place": Case(lambda: nn.ReLU(inplace=True), _x(2, 4)),
    "GLU": Case(lambda: nn.GLU(), _x(2, 4)),
    "Softmax": Case(lambda: nn.Softmax(dim=1), _x(2, 4)),
    "Softmax2d": Case(lambda: nn.Softmax2d(), _x(2, 4, L, L)),
    "LogSoftmax": Case(lambda: nn.LogSoftmax(dim=-1), _x(2, 4)),
    "Softmin": Case(lambda: nn.Softmin(dim=1), _x(2, 4)),
    "Threshold": Case(lambda: nn.Threshold(0.1, 0.2), _x(2, 4)),
    "AdaptiveLogSoftmaxWithLoss": Case(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3]), lambda: (torch.randn(6, 4).double(), torch.randint(9, (6,)))
    ),
    "Embedding": Case(lambda: nn.Embedding(7, 4), lambda: (torch.randint(7, (2, 5)),)),
    "Embedding, padding": Case(lambda: nn.Embedding(7, 4, padding_idx=2), lambda: (torch.tensor([[2, 1, 2, 6, 0]]),)),
    "Embedding, max norm": Case(lambda: nn.Embedding(7, 4, max_norm=1.0), lambda: (torch.randint(7, (2, 5)),)),
    "Embedding, by frequency": Case(
        lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), lambda: (torch.tensor([[2, 1, 2, 6, 0]]),)
    ),
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(7, 4), lambda: (torch.randint(7, (3, 5)),)),
    "Flatten": Case(lambda: nn.Flatten(), _x(2, 4, L)),
    "Unflatten": Case(lambda: nn.Unflatten(1, (2, 2)), _x(2, 4, L)),
    "Fold": Case(lambda: nn.Fold((4, 4), 2), _x(2, 8, 9)),
    "Unfold": Case(lambda: nn.Unfold(2), _x(2, 3, 4, 4)),
    "PixelShuffle": Case(lambda: nn.PixelShuffle(2), _x(2, 4, L, L)),
    "PixelUnshuffle": Case(lambda: nn.PixelUnshuffle(2), _x(2, 4, L, L)),
    "ChannelShuffle": Case(lambda: nn.ChannelShuffle(2), _x(2, 4, L, L)),
    "Upsample": Case(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), _x(2, 4, L, L)),
    "UpsamplingBilinear2d": Case(lambda: nn.UpsamplingBilinear2d(scale_factor=2), _x(2, 4, L, L)),
    "UpsamplingNearest2d": Case(lambda: nn.UpsamplingNearest2d(scale_factor=2), _x(2, 4, L, L)),
    "FractionalMaxPool2d": Case(lambda: nn.FractionalMaxPool2d(2, output_size=3), _x(2, 4, L, L)),
    "FractionalMaxPool3d": Case(lambda: nn.FractionalMaxPool3d(2, output_size=3), _x(2, 4, L, L, L)),
    "Dropout": Case(lambda: nn.Dropout(0.4), _x(2, 4)),
    "AlphaDropout": Case(lambda: nn.AlphaDropout(0.4), _x(2, 4)),
    "FeatureAlphaDropout": Case(lambda: nn.FeatureAlphaDropout(0.4), _x(2, 4, L)),
    "Dropout1d": Case(lambda: nn.Dropout1d(0.4), _x(2, 4, L)),
    "Dropout2d": Case(lambda: nn.Dropout2d(0.4), _x(2, 4, L, L)),
    "Dropout3d": Case(lambda: nn.Dropout3d(0.4), _x(2, 4, L, L, L)),
    "RNN": Case(lambda: nn.RNN(4, 5, 2), _x(L, 2, 4)),
    "RNN, relu": Case(lambda: nn.RNN(4, 5, nonlinearity="relu", bias=False), _x(L, 2, 4)),
    "GRU": Case(lambda: nn.GRU(4, 5, 2, bidirectional=True, batch_first=True), _x(2, L, 4)),
    "LSTM": Case(lambda: nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True), _x(2, L, 4)),
    "LSTM, projected": Case(lambda: nn.LSTM(4, 5, proj_size=3), _x(L, 2, 4)),
    "LSTM, inner dropout": Case(lambda: nn.LSTM(4, 5, 2, dropout=0.5), _x(L, 2, 4)),
    "RNNCell": Case(lambda: nn.RNNCell(4, 5), lambda: (torch.randn(2, 4).double(), torch.randn(2, 5).double())),
    "GRUCell": Case(lambda: nn.GRUCell(4, 5), lambda: (torch.randn(2, 4).double(), torch.randn(2, 5).double())),
    "LSTMCell": Case(lambda: nn.LSTMCell(4, 5), _x(2, 4)),
    "MultiheadAttention": Case(lambda: _Attention(), _x(2, 5, 8)),
    "MultiheadAttention, no bias": Case(lambda: _Attention(bias=False), _x(2, 5, 8)),
    "MultiheadAttention, padded": Case(
        lambda: _Attention(),
        lambda: (torch.randn(2, 5, 8).double(), torch.tensor([[False] * 5, [False, False, True, True, True]])),
    ),
    "TransformerEncoderLayer": Case(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), _x(2, 5, 8)),
    "TransformerEncoderLayer, norm first": Case(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", norm_first=True), _x(5, 2, 8)
    ),
    "TransformerEncoder": Case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        _x(2, 5, 8),
    ),
    "TransformerDecoderLayer": Case(lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), _two(2, 5, 8)),
    "TransformerDecoder": Case(lambda: _Decoder(), _two(2, 5, 8)),
    "Transformer": Case(lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True), _two(2, 5, 8)),
    "CosineSimilarity": Case(lambda: nn.CosineSimilarity(), _two(3, 4)),
    "PairwiseDistance": Case(lambda: nn.PairwiseDistance(), _two(3, 4)),
    # Losses
    "L1Loss": Case(lambda: nn.L1Loss(), _two(3, 4)),
    "MSELoss": Case(lambda: nn.MSELoss(), _two(3, 4)),
    "HuberLoss": Case(lambda: nn.HuberLoss(), _two(3, 4)),
    "SmoothL1Loss": Case(lambda: nn.SmoothL1Loss(), _two(3, 4)),
    "BCELoss": Case(lambda: nn.BCELoss(), _two(3, 4), positive=True),
    "BCEWithLogitsLoss": Case(lambda: nn.BCEWithLogitsLoss(), _two(3, 4)),
    "CrossEntropyLoss": Case(lambda: nn.CrossEntropyLoss(), _classes(5, 4)),
    "CrossEntropyLoss, weighted, smoothed": Case(
        lambda: nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0, 1.5]).double(), label_smoothing=0.1), _classes(5, 4)
    ),
    "CrossEntropyLoss, ignored": Case(
        lambda: nn.CrossEntropyLoss(ignore_index=1),
        lambda: (torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 1, 3])),
    ),
    "NLLLoss": Case(lambda: nn.Sequential(nn.NLLLoss()) and nn.NLLLoss(), _classes(5, 4)),
    "CTCLoss": Case(
        lambda: nn.CTCLoss(),
        lambda: (
            torch.randn(8, 2, 5).double(),
            torch.randint(1, 5, (2, 3)),
            torch.tensor([8, 8]),
            torch.tensor([3, 2]),
        ),
    ),
    "KLDivLoss": Case(lambda: nn.KLDivLoss(reduction="batchmean"), _two(3, 4), positive=True),
    "PoissonNLLLoss": Case(lambda: nn.PoissonNLLLoss(), _two(3, 4)),
    "GaussianNLLLoss": Case(
        lambda: nn.GaussianNLLLoss(),
        lambda: (torch.randn(3, 4).double(), torch.randn(3, 4).double(), torch.rand(3, 4).double() + 0.5),
        positive=True,
    ),
    "HingeEmbeddingLoss": Case(
        lambda: nn.HingeEmbeddingLoss(), lambda: (torch.randn(3, 4).double(), torch.randint(2, (3, 4)) * 2 - 1)
    ),
    "SoftMarginLoss": Case(
        lambda: nn.SoftMarginLoss(), lambda: (torch.randn(3, 4).double(), torch.randint(2, (3, 4)) * 2 - 1)
    ),
    "CosineEmbeddingLoss": Case(
        lambda: nn.CosineEmbeddingLoss(),
        lambda: (torch.randn(3, 4).double(), torch.randn(3, 4).double(), torch.tensor([1, -1, 1])),
    ),
    "MarginRankingLoss": Case(
        lambda: nn.MarginRankingLoss(),
        lambda: (torch.randn(3).double(), torch.randn(3).double(), torch.tensor([1, -1, 1])),
    ),
    "MultiMarginLoss": Case(lambda: nn.MultiMarginLoss(), _classes(5, 4)),
    "MultiLabelMarginLoss": Case(
        lambda: nn.MultiLabelMarginLoss(), lambda: (torch.randn(2, 4).double(), torch.tensor([[3, 0, -1, 1]] * 2))
    ),
    "MultiLabelSoftMarginLoss": Case(
        lambda: nn.MultiLabelSoftMarginLoss(), lambda: (torch.randn(2, 4).double(), torch.randint(2, (2, 4)))
    ),
    "TripletMarginLoss": Case(
        lambda: nn.TripletMarginLoss(), lambda: tuple(torch.randn(3, 4).double() for _ in range(3))
    ),
    "TripletMarginWithDistanceLoss": Case(
        lambda: nn.TripletMarginWithDistanceLoss(), lambda: tuple(torch.randn(3, 4).double() for _ in range(3))
    ),
}
for _name in (
    "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish ReLU ReLU6 SELU SiLU Sigmoid "
    "Softplus Softshrink Softsign Tanh Tanhshrink"
).split():
    CASES[_name] = Case(lambda n=_name: getattr(nn, n)(), _x(2, 4))
if hasattr(nn, "LinearCrossEntropyLoss"):
    CASES["LinearCrossEntropyLoss"] = Case(
        lambda: nn.LinearCrossEntropyLoss(4, 5), lambda: (torch.randn(3, 4).double(), torch.randint(5, (3,)))
    )

RANDOM = {name for name in CASES if "ropout" in name and "eval" not in name} | {
    "RReLU",
    "FractionalMaxPool2d",
    "FractionalMaxPool3d",
}
NOT_LAYERS = {
    *("Module Sequential ModuleList ModuleDict ParameterList ParameterDict Container DataParallel".split()),
    *("RNNBase RNNCellBase NLLLoss2d".split()),
}
"""Containers and bases; NLLLoss2d is another name of NLLLoss."""
