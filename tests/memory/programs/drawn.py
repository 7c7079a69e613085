"""Programs drawn at random: the source of a model and of its training loop, from one number.

`draw(seed)` writes Python text, so that a program which differs can be printed, read and cut down. A model is a class
whose forward is a list of statements over named values of three kinds (rows, sequences, images), each of which makes a
new value of one kind: a layer, a function, a method, a write in place, a branch, a loop, a region, a nested function,
something kept on the model. What a block makes inside it stays inside, so every value that is named exists. The loop is
written out step by step: what it changes before and after each forward, how it comes to gradients, what it notes.

`outcome(seed)` runs the text plainly and under policies and compares what both noted. A program that plain PyTorch
refuses is no finding, whatever happens under policies; nor is one that plain PyTorch does not repeat.

``python -m tests.memory.programs.drawn SEED [SEED] [MODE] [--device cuda]`` prints one program and how it ended, or
runs a range of them.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import faulthandler
import linecache
import random
import sys
import traceback
import types
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import outcore

from .run import Run, differences, square

__all__ = ["Outcome", "draw", "mode_of", "outcome"]

_MODES = ("recompute", "recompute", "mixture", "mixture", "mixture", "offload", "encode", "keep")

ROWS, SEQUENCE, IMAGE = "rows", "sequence", "image"
_WIDTH, _LENGTH, _CHANNELS = 8, 4, 4

_ANY = (
    "torch.tanh({x})",
    "F.gelu({x})",
    "{x}.relu()",
    "F.relu({x})",
    "torch.relu({x})",
    "F.silu({x})",
    "F.leaky_relu({x}, 0.1)",
    "F.elu({x})",
    "F.softplus({x})",
    "F.hardtanh({x}, -1.5, 1.5)",
    "F.softmax({x}, -1)",
    "{x}.sigmoid() * {x}",
    "{x}.sin()",
    "{x}.clamp(-1, 1)",
    "{x}.clamp(min=-0.5)",
    "{x}.abs().add(0.1).sqrt()",
    "({x}.square() + 1).log()",
    "torch.exp(-{x}.abs())",
    "{x} / (1 + {x}.norm(dim=-1, keepdim=True))",
    "{x} / (1 + {y}.abs())",
    "{x} + {y}",
    "{x} - {y}",
    "{x} * {y}",
    "{x} * 0.5 + {y}",
    "1.5 - {x}",
    "2 / (2 + {x}.abs())",
    "torch.add({x}, {y}, alpha=0.3)",
    "torch.lerp({x}.float(), {y}.float(), 0.3)",
    "torch.addcmul({x}, {y}, {y}, value=0.1)",
    "torch.where({x} > 0, {x}, {y})",
    "torch.where({x} > {y}, {x}, torch.zeros_like({x}))",
    "torch.maximum({x}, {y})",
    "torch.min({x}, {y})",
    "{x}.masked_fill({x} > 1, 0.5)",
    "{x}.masked_fill({y} < 0, 0.1)",
    "{x}.flip(-1)",
    "{x}.roll(1, -1)",
    "{x}.cumsum(-1) * 0.2",
    "torch.cat([{x}, {y}]).chunk(2)[1]",
    "torch.cat({x}.chunk(2, -1)[::-1], -1)",
    "torch.stack([{x}, {y}], 1).mean(1)",
    "torch.stack([{x}, {y}])[0]",
    "torch.stack({x}.unbind(-1)[::-1], -1)",
    "torch.cat({x}.split([1, {x}.shape[-1] - 1], -1)[::-1], -1)",
    "{x}.sort(-1)[0]",
    "{x}.max(-1, keepdim=True)[0] + {y}",
    "{x}.max(-1, keepdim=True).values * {y}",
    "{x}.amax(-1, keepdim=True) - {x}",
    "{x}.gather(-1, {y}.argsort(-1))",
    "{x}.gather(-1, {y}.max(-1, keepdim=True)[1]) + {x}",
    "torch.take_along_dim({x}, {x}.argsort(-1), -1)",
    "{x}.logsumexp(-1, keepdim=True) + {x}",
    "{x}.mean(-1, keepdim=True) * {x}",
    "{x}.var(-1, keepdim=True) + {x}",
    "({x} - {x}.mean(0)) / ({x}.std(0, unbiased=False) + 1)",
    "{x}.double().mul(0.5).float()",
    "{x}.bfloat16().float()",
    "{x}.to(torch.float16).to(torch.float32)",
    "{x}.detach() * {y}",
    "{x} + {y}.detach()",
    "{x} * self.alpha",
    "{x} * STATE['scale']",
    "{x} * self.options.scale",
    "{x} * self.sizes['a']",
    "F.dropout({x}, 0.3, self.training)",
    "F.dropout({x}, self.rate, self.training)",
    "F.dropout({x}, p=self.rate, training=self.training)",
    "{x} + torch.randn_like({x}) * 0.1",
    "{x} + 0.1 * torch.rand({x}.shape)",
    "{x} * torch.bernoulli(torch.full_like({x}, 0.7))",
    "{x} * (torch.rand_like({x}) > 0.3)",
    "{x} * random.random()",
    "{x} * float(np.random.rand())",
    "{x} + torch.from_numpy(np.random.rand({x}.shape[-1])).float()",
    "{x}[torch.randperm(len({x}))]",
    "{x}.index_select(0, torch.arange(len({x}) - 1, -1, -1))",
    "{x} * {x}.max().item()",
    "{x} / (1 + float({x}.detach().std(unbiased=False)))",
    "{x}.expand(2, *{x}.shape).sum(0)",
    "{x}.repeat(2, *[1] * ({x}.dim() - 1))[: len({x})]",
    "{x}.transpose(0, 1).contiguous().transpose(0, 1)",
    "{x}.transpose(0, -1).transpose(0, -1) * 2",
    "{x}.flatten(1).view({x}.shape)",
    "{x}.reshape(-1).reshape({x}.shape)",
    "{x}.clone()",
    "F.pad({x}[..., 1:], (1, 0))",
    "F.pad({x}, (1, 1))[..., 2:]",
    "F.normalize({x}, dim=-1)",
    "Twice.apply({x})",
    "Reversed.apply({x}, self.alpha)",
    "Clipped.apply({x})",
    "F.glu(torch.cat([{x}, {y}], -1), -1)",
    "{x}.unsqueeze(0).squeeze(0)",
    "{x}[:, None].expand(-1, 2, *[-1] * ({x}.dim() - 1)).mean(1)",
    "{x}.float().index_add(0, torch.arange(len({x})), {y}.float())",
    "{x}.scatter(-1, torch.zeros_like({x}[..., :1], dtype=torch.long), 0.5)",
    "{x}.float().scatter_add(0, torch.zeros_like({x}, dtype=torch.long), {y}.float()) * 0.3",
    "torch.tril({x}.flatten(1)).view({x}.shape)",
    "({x} > 0).float() * {y}",
    "{x} * (1 if {x}.sum() > 0 else -1)",
    "(lambda t: t * self.alpha + 1)({x})",
    "sum([{x}, {y}, {x} * 0.1])",
    "{x} ** 2",
    "{x}.pow(3) * 0.1",
    "-{x}",
    "{x}.float()",
    "{x}.type_as({y})",
    "helper({x}, self.alpha)",
    "{x}.erf()",
    "F.mish({x})",
    "F.logsigmoid({x})",
    "F.softsign({x})",
    "F.hardswish({x})",
    "F.threshold({x}, 0.1, 0.0)",
    "torch.atan2({x}, {y} + 2)",
    "{x}.masked_select({x} > 0).sum() * 0.1 + {x}",
    "{x}[{x} > 0].mean() + {y} if ({x} > 0).any() else {y}",
    "F.rrelu({x}, training=self.training)",
    "F.gumbel_softmax({x}, tau=1 + abs(self.alpha))",
    "torch.cat([{x}[:1], {x}[1:] * 2])",
    "torch.nan_to_num({x})",
    "torch.vmap(lambda t: t.sin() * 2)({x})",
)
_OF_KIND = {
    ROWS: (
        "{x} @ {p88}",
        "torch.matmul({x}[:, None], {p88})[:, 0]",
        "torch.einsum('bi,ij->bj', {x}, {p88})",
        "torch.addmm({p8}, {x}, {p88})",
        "torch.mm({x}, {p88}.t())",
        "F.linear({x}, {p88}, {p8})",
        "F.linear({x}, {p88})",
        "torch.bmm({x}[:, :, None], {y}[:, None]).mean(1)",
        "torch.outer({x}[:, 0], {p8})",
        "torch.mv({x}, {p8})[:, None] + {y}",
        "({x} * {y}).sum(1, keepdim=True) + {p8}",
        "F.layer_norm({x}, (8,))",
        "F.layer_norm({x}, (8,), {p8})",
        "F.embedding(({x} * 2).long().clamp(0, 4)[:, 0], {p88}) + {x}",
        "{p88}[({x} * 2).long().clamp(0, 4)[:, 1]] * {x}",
        "{x}.topk(4, 1)[0].repeat(1, 2)",
        "{x}.reshape(-1, 2, 4).transpose(1, 2).reshape(-1, 8)",
        "{x}.view(-1, 2, 4).permute(1, 0, 2).flatten(0, 1).view(-1, 8)",
        "{x}.unfold(1, 3, 1).mean(-1).repeat(1, 2)[:, :8]",
        "torch.cat([{x}[:, 4:], {y}[:, :4]], 1)",
        "torch.stack([{x}[:, i] * i for i in range(8)], 1)",
        "F.batch_norm({x}, self.mean8, self.var8, training=self.training)",
        "F.batch_norm({x}, self.mean8, self.var8, {p8}, {p8}, self.training, 0.2)",
        "{x} - self.ema",
        "{x} + self.ema * 0.1",
        "{x} - self.mean8",
        "torch.tanh({x} + self.mean8)",
        "torch.sigmoid({x} - self.ema)",
        "F.cosine_similarity({x}, {y}, dim=1)[:, None] * {x}",
        "torch.cdist({x} + 0.1, {y}).mean(1, keepdim=True) + {x}",
        "F.softmax({x} @ {y}.t(), 1) @ {x}",
        "F.prelu({x}, {p8})",
        "{x} * {p8} + {p8}",
        "{x} * self.plain8",
        "F.bilinear({x}.float(), {y}.float(), torch.ones(8, 8, 8) * 0.01)",
    ),
    SEQUENCE: (
        "torch.softmax({x} @ {y}.transpose(1, 2) / 3, -1) @ {x}",
        "F.scaled_dot_product_attention({x}, {y}, {x})",
        "F.scaled_dot_product_attention({x}, {x}, {x}, is_causal=True)",
        "torch.matmul({x}, {p88})",
        "{x} @ {p88}.t()",
        "torch.einsum('btd,de->bte', {x}, {p88})",
        "torch.einsum('btd,bsd->bts', {x}, {y}) @ {x} * 0.1",
        "torch.bmm({x}, {y}.transpose(1, 2)).softmax(-1).bmm({x})",
        "torch.baddbmm({x}, {x} @ {y}.transpose(1, 2), {y}, alpha=0.1)",
        "F.linear({x}, {p88}, {p8})",
        "F.layer_norm({x}, (8,), {p8}, {p8})",
        "{x}.masked_fill(torch.ones(4, 8).triu(1).bool(), 0)",
        "{x}.view(-1, 4, 2, 4).transpose(1, 2).reshape(-1, 4, 8)",
        "{x}.permute(1, 0, 2).flip(0).permute(1, 0, 2)",
        "torch.stack([t * i for i, t in enumerate({x}.unbind(1))], 1)",
        "torch.cat([{x}[:, 1:], {x}[:, :1]], 1)",
        "{x} + {x}.mean(1, keepdim=True)",
        "{x}.cumsum(1) / 2",
    ),
    IMAGE: (
        "F.conv2d({x}, {p4433}, padding=1)",
        "F.conv2d({x}, {p4433}[:, :1], padding=1, groups=4)",
        "F.max_pool2d({x}, 3, 1, 1)",
        "F.avg_pool2d({x}, 3, 1, 1)",
        "{x} * {x}.mean((2, 3), keepdim=True).sigmoid()",
        "{x} + {x}.flip(3)",
        "{x}.contiguous(memory_format=torch.channels_last)",
        "{x}.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)",
        "F.interpolate(F.avg_pool2d({x}, 2), size={x}.shape[2:], mode='nearest')",
        "F.interpolate(F.max_pool2d({x}, 2), scale_factor=2, mode='bilinear')",
        "F.group_norm({x}, 2)",
        "F.instance_norm({x})",
        "F.batch_norm({x}, None, None, training=True)",
        "F.dropout2d({x}, 0.2, self.training)",
        "{x} * {p4}[:, None, None]",
        "torch.cat([{x}[:, 2:], {y}[:, :2]], 1)",
        "F.pixel_shuffle(torch.cat([{x}] * 4, 1), 2)[..., ::2, ::2]",
        "F.adaptive_avg_pool2d({x}, 1) + {x}",
        "F.adaptive_max_pool2d({x}, 2).mean((2, 3), keepdim=True) * {x}",
        "F.max_pool2d({x}, 2, return_indices=True)[0].repeat(1, 1, 2, 2)",
        "F.max_unpool2d(*F.max_pool2d({x}, 2, return_indices=True), 2)",
        "F.pad({x}, (1, 1, 1, 1), mode='reflect')[..., 1:-1, 1:-1]",
        "F.local_response_norm({x}, 2)",
        "torch.einsum('bchw,cd->bdhw', {x}, {p44})",
    ),
}
_BETWEEN = {
    (ROWS, SEQUENCE): (
        "{x}[:, None].expand(-1, 4, -1)",
        "{x}[:, None].repeat(1, 4, 1)",
        "{x}[:, None] * {p48}",
        "torch.stack([{x}] * 4, 1)",
        "{lift}({x}).view(-1, 4, 8)",
        "{lift}({x}).unflatten(1, (4, 8))",
    ),
    (ROWS, IMAGE): (
        "{x}[:, :4, None, None].expand(-1, -1, 4, 4) * 1",
        "{tile}({x}).view(-1, 4, 4, 4)",
        "{tile}({x}).reshape(-1, 4, 4, 4)",
    ),
    (SEQUENCE, ROWS): (
        "{x}.mean(1)",
        "{x}[:, 0]",
        "{x}[:, -1] + {x}[:, 0]",
        "{x}.max(1).values",
        "{x}.unbind(1)[1]",
        "{fold}({x}.flatten(1))",
        "{fold}({x}.reshape(len({x}), -1))",
        "{x}.sum(1) * 0.3",
        "{gru}({x})[0][:, -1]",
        "{gru}({x})[1][0]",
    ),
    (IMAGE, ROWS): (
        "{narrow}({x}.mean((2, 3)))",
        "{narrow}(F.adaptive_avg_pool2d({x}, 1).flatten(1))",
        "{narrow}({x}.amax((2, 3)))",
        "torch.cat([{x}.mean((2, 3)), {x}.flatten(2).max(2)[0]], 1)",
        "{x}[:, :, :2, 0].flatten(1)",
    ),
}
_LAYERS = {
    ROWS: (
        "nn.Linear(8, 8)",
        "nn.Linear(8, 8)",
        "nn.Linear(8, 8, bias=False)",
        "nn.BatchNorm1d(8)",
        "nn.BatchNorm1d(8, track_running_stats=False)",
        "nn.BatchNorm1d(8, affine=False)",
        "nn.LayerNorm(8)",
        "nn.RMSNorm(8)",
        "nn.Dropout(0.2)",
        "nn.ReLU()",
        "nn.GELU()",
        "nn.PReLU()",
        "nn.Softmax(1)",
        "nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))",
        "nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3))",
        "nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Identity(), nn.Linear(8, 8), nn.Sigmoid())",
        "nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh()])",
        "nn.ModuleDict({'a': nn.Linear(8, 8), 'b': nn.SiLU()})",
        "parametrizations.weight_norm(nn.Linear(8, 8))",
        "parametrizations.spectral_norm(nn.Linear(8, 8))",
        "nn.GRUCell(8, 8)",
        "nn.RNNCell(8, 8)",
        "nn.Bilinear(8, 8, 8)",
        "nn.AlphaDropout(0.1)",
        "nn.Hardtanh(inplace=True)",
        "nn.Dropout(0.2, inplace=True)",
        "nn.ReLU(inplace=True)",
        "nn.SiLU(inplace=True)",
        "nn.LeakyReLU(0.1, inplace=True)",
        "Passing(nn.Linear(8, 8))",
    ),
    SEQUENCE: (
        "nn.Linear(8, 8)",
        "nn.LayerNorm(8)",
        "nn.LayerNorm((4, 8))",
        "nn.MultiheadAttention(8, 2, batch_first=True)",
        "nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)",
        "nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)",
        "nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)",
        "nn.GRU(8, 8, batch_first=True)",
        "nn.LSTM(8, 8, batch_first=True)",
        "nn.Conv1d(4, 4, 3, padding=1)",
        "nn.BatchNorm1d(4)",
        "nn.InstanceNorm1d(4)",
        "nn.Dropout(0.2)",
        "nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))",
        "nn.ReLU(inplace=True)",
    ),
    IMAGE: (
        "nn.Conv2d(4, 4, 3, padding=1)",
        "nn.Conv2d(4, 4, 3, padding=1, bias=False)",
        "nn.Conv2d(4, 4, 1)",
        "nn.Conv2d(4, 4, 3, padding=1, groups=4)",
        "nn.Conv2d(4, 4, 3, padding=1, padding_mode='circular')",
        "nn.ConvTranspose2d(4, 4, 3, padding=1)",
        "nn.BatchNorm2d(4)",
        "nn.BatchNorm2d(4)",
        "nn.BatchNorm2d(4, momentum=None)",
        "nn.InstanceNorm2d(4, affine=True)",
        "nn.InstanceNorm2d(4, track_running_stats=True)",
        "nn.GroupNorm(2, 4)",
        "nn.ReLU()",
        "nn.ReLU(inplace=True)",
        "nn.ReLU6(inplace=True)",
        "nn.Dropout2d(0.2)",
        "nn.MaxPool2d(3, 1, 1)",
        "nn.AvgPool2d(3, 1, 1)",
        "nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))",
        "nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.Upsample(scale_factor=2))",
        "parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1))",
    ),
}
_IN_PLACE = (
    "{t}.relu_()",
    "F.relu({t}, True)",
    "F.relu({t}, inplace=True)",
    "F.relu_({t})",
    "{t}.mul_(0.5)",
    "{t}.mul_({y})",
    "{t} *= 0.7",
    "{t} += {y}",
    "{t} -= 0.1",
    "{t} /= 2",
    "{t}.add_({y})",
    "{t}.add_({y}, alpha=0.2)",
    "{t}.sigmoid_()",
    "{t}.tanh_()",
    "{t}.neg_()",
    "{t}.clamp_(-1, 1)",
    "{t}.sin_()",
    "{t}[:, 0] = 0.3",
    "{t}[:, 1:3] = {y}[:, :2]",
    "{t}[:, :2] *= 2",
    "{t}[:, 2:].add_(1)",
    "{t}[{t} > 1] = 0.2",
    "{t}[..., 0].mul_(2)",
    "{t}.masked_fill_({y} > 0, 0.1)",
    "{t}.copy_({y})",
    "{t}.zero_().add_({y})",
    "{t}.select(1, 0).fill_(0.2)",
    "{t}.transpose(0, 1).mul_(0.5)",
    "{t}.index_fill_(1, torch.tensor([0]), 0.3)",
    "F.dropout({t}, 0.2, self.training, True)",
    "F.dropout({t}, 0.2, self.training, inplace=True)",
    "F.leaky_relu({t}, 0.1, True)",
    "F.elu_({t})",
    "F.hardtanh({t}, -1, 1, True)",
    "{t}.detach().mul_(0.5)",
    "{t}.data.mul_(0.5)",
    "torch._foreach_mul_([{t}], 0.5)",
    "{t}.addcmul_({y}, {y}, value=0.1)",
    "{t}.lerp_({y}.to({t}.dtype), 0.5)",
    "{t}.detach().uniform_(-1, 1)",
    "{t}[:, 0] += 1",
    "{t}[:, 1].copy_({y}[:, 0])",
    "{t}.view(-1)[0] = 0.5",
    "{t}.pow_(2)",
    "{t}.index_add_(0, torch.arange(len({t})), {y}.to({t}.dtype))",
    "torch.clamp({t}, -1, 1, out={t}) if not torch.is_grad_enabled() else None",
)
_SAVING = ("relu", "sigmoid", "tanh", "elu", "dropout", "mul_({y})")
"""What must not be followed by another write, because its backward needs what it wrote."""
_WRITABLE = ("nn.Linear", "nn.Conv", "nn.BatchNorm", "nn.LayerNorm", "nn.InstanceNorm")
"""Layers whose backward does not need what they return."""
_READING = (
    "torch.tanh({t})",
    "{t}.sigmoid()",
    "F.relu({t})",
    "{t} + 1",
    "{t} * 2",
    "{t}.exp()",
    "F.softmax({t}, -1)",
    "{t}.clone()",
    "torch.cat([{t}[:1], {t}[1:]])",
    "torch.stack([{t}, {t}]).sum(0)",
    "F.dropout({t}, 0.2, self.training)",
    "{t}.sqrt().nan_to_num()",
    "{t}.flip(-1)",
    "F.threshold({t}.clone(), 0.0, 0.1)",
)
"""Functions whose backward needs nothing of what they read."""
_FRESH = ("{x} + {y}", "{x} * 1.5", "{x}.clone()", "{x} - {y}", "1 - {x}", "{y}.detach().clone() + {x}", "{x} * 1")
_REGIONS = (
    "if if data data for for no_grad autocast try def checkpoint while raise cond residual generator enable dropped"
).split()
_KEPT = (
    "calls list number dict aux ema ema_ hook count kept state global print retain options nested deque "
    "data once buffer grads carried alias"
).split()
_CHANGES = (
    "written alpha flag count scale options rate mode layer_mode freeze unfreeze swap hook pre unhook dropout eps "
    "inplace draw seen buffer weights backward plain8 method sizes format data parametrize raising state "
    "forward part"
).split()
_HEADER = '''
class Passing(nn.Module):
    """A layer inside another, called twice."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.gain, self.times = inner, 1.0, 0

    def forward(self, x):
        self.times += 1
        return torch.tanh(self.inner(x) * self.gain) + self.inner(x)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.scale * g, None


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clamp(-1, 1)
        ctx.save_for_backward(y)
        ctx.mask = (x == y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * ctx.mask + 0.01 * y


STATE = {"scale": 1.0, "n": 0}


def helper(x, scale):
    return torch.tanh(x) * scale + STATE["scale"]
'''


@dataclass
class _Class:
    """A module class that is being written."""

    name: str
    layers: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Attribute -> what makes it, and the kind of value it takes."""
    parameters: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    depth: int = 0
    names: int = 0
    points: int = 0
    """Places at which it may be told to raise."""
    kept: dict[str, str] = field(default_factory=dict)
    """Attribute -> the kind of the value that a call leaves in it."""

    def write(self, line: str) -> None:
        """One line of its forward."""
        self.lines.append("    " * (self.depth + 2) + line)

    def new(self) -> str:
        """A name for a value."""
        self.names += 1
        return f"v{self.names}"


class _Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.parts: list[str] = []
        self.into: _Class = _Class("Net")
        self.nested = 0

    def chance(self, probability: float) -> bool:
        return self.pick.random() < probability

    # The model

    def layer(self, made: str, kind: str, share: float = 0.15) -> str:
        """A layer of the class that is being written; sometimes one that is there already."""
        into = self.into
        same = [name for name, row in into.layers.items() if row == (made, kind)]
        if same and self.chance(0.6):
            return f"self.{self.pick.choice(same)}"
        name = f"m{len(into.layers)}"
        into.layers[name] = made, kind
        return f"self.{name}"

    def parameter(self, shape: str) -> str:
        """A parameter of that class."""
        into = self.into
        same = [name for name, other in into.parameters.items() if other == shape]
        if same and self.chance(0.5):
            return f"self.{self.pick.choice(same)}"
        name = f"w{len(into.parameters)}"
        into.parameters[name] = shape
        return f"self.{name}"

    def fill(self, text: str, scope: dict[str, str], x: str, kind: str) -> str:
        """An expression over values of a kind."""
        same = [name for name, of in scope.items() if of == kind]
        filled = text.replace("{x}", x)
        while "{y}" in filled:
            filled = filled.replace("{y}", self.pick.choice(same), 1)
        for place, shape in (
            ("{p88}", "8, 8"),
            ("{p8}", "8"),
            ("{p48}", "4, 8"),
            ("{p4433}", "4, 4, 3, 3"),
            ("{p44}", "4, 4"),
            ("{p4}", "4"),
        ):
            while place in filled:
                filled = filled.replace(place, self.parameter(shape), 1)
        for place, made, of in (
            ("{lift}", "nn.Linear(8, 32)", ROWS),
            ("{fold}", "nn.Linear(32, 8)", "flat"),
            ("{tile}", "nn.Linear(8, 64)", ROWS),
            ("{narrow}", "nn.Linear(4, 8)", "narrow"),
            ("{gru}", "nn.GRU(8, 8, batch_first=True)", SEQUENCE),
        ):
            if place in filled:
                filled = filled.replace(place, self.layer(made, of))
        return filled

    def called(self, x: str, kind: str, scope: dict[str, str]) -> str:
        """A call of a layer."""
        if self.nested < 2 and self.chance(0.12):
            name = self.part(kind)
            return f"{self.layer(f'{name}()', kind)}({x})"
        made = self.pick.choice(_LAYERS[kind])
        if "inplace=True" in made and not made.startswith("nn.Sequential"):
            x = f"{x} + {self.pick.choice([n for n, k in scope.items() if k == kind])}"
        layer = self.layer(made, kind)
        if made.startswith("nn.GroupNorm"):  # torch crashes in its backward over channels last without a gradient
            return f"{layer}({x}.contiguous())"
        if made.startswith("nn.MultiheadAttention"):
            y = self.pick.choice([n for n, k in scope.items() if k == kind])
            return f"{layer}({x}, {y}, {x}{self.pick.choice(['', ', need_weights=False'])})[0]"
        if made.startswith(("nn.GRU(", "nn.LSTM(")):
            return f"{layer}({x})[0]"
        if made.startswith("nn.ModuleList"):
            return f"{layer}[{self.pick.choice(['2', '0', '1', 'self.count % 3', '-1'])}]({x})"
        if made.startswith("nn.ModuleDict"):
            chosen = self.pick.choice(("'a'", "'b'", "'a' if self.flag else 'b'"))
            return f"{layer}[{chosen}]({x})"
        if made.startswith(("nn.GRUCell", "nn.RNNCell", "nn.Bilinear")):
            y = self.pick.choice([n for n, k in scope.items() if k == kind])
            return f"{layer}({x}.float(), {y}.float())"
        return f"{layer}({x})"

    def part(self, kind: str) -> str:
        """A module class of its own, from a kind to the same kind; returns its name."""
        outer, self.nested = self.into, self.nested + 1
        self.into = _Class(f"Part{len(self.parts)}")
        self.parts.append("")
        place = len(self.parts) - 1
        scope = {"x": kind}
        last = self.block(scope, "x", kind, self.pick.randint(1, 5))
        self.into.write(f"return {last}")
        self.parts[place] = self.text(self.into)
        name = self.into.name
        self.into, self.nested = outer, self.nested - 1
        return name

    def block(self, scope: dict[str, str], x: str, kind: str, count: int) -> str:
        """Some statements; returns the name of a value of the kind they began with."""
        current, of = x, kind
        for _ in range(count):
            current, of = self.statement(scope, current, of)
            if self.chance(0.1):
                self.keep(scope, current, of)
        if of != kind:
            current = self.converted(scope, current, of, kind)
        return current

    def converted(self, scope: dict[str, str], x: str, kind: str, to: str) -> str:
        """A value as another kind."""
        if (kind, to) not in _BETWEEN:
            x, kind = self.converted(scope, x, kind, ROWS), ROWS
        name = self.into.new()
        self.into.write(f"{name} = {self.fill(self.pick.choice(_BETWEEN[kind, to]), scope, x, kind)}")
        scope[name] = to
        return name

    def statement(self, scope: dict[str, str], current: str, kind: str) -> tuple[str, str]:
        """One statement; returns what it made and of which kind."""
        write, into, pick = self.into.write, self.into, self.pick
        same = [name for name, of in scope.items() if of == kind]
        x = current if self.chance(0.75) else pick.choice(same)
        name = into.new()
        draw = pick.random()
        if draw < 0.08:
            to = pick.choice([k for k in (ROWS, SEQUENCE, IMAGE) if k != kind])
            return self.converted(scope, x, kind, to), to
        if draw < 0.36:
            write(f"{name} = {self.called(x, kind, scope)}")
        elif draw < 0.70:
            text = pick.choice(_OF_KIND[kind] if self.chance(0.4) else _ANY)
            write(f"{name} = {self.fill(text, scope, x, kind)}")
        elif draw < 0.80:
            if self.chance(0.98):
                fresh = pick.choice(_FRESH)
                if self.chance(0.3):
                    made = pick.choice([m for m in _LAYERS[kind] if m.startswith(_WRITABLE)])
                    fresh = f"{self.layer(made, kind)}({x})"
                write(f"{name} = {self.fill(fresh, scope, x, kind)}")
            else:
                name = x
            if self.chance(0.3):
                first = pick.choice([t for t in _IN_PLACE if not any(saves in t for saves in _SAVING)])
                write(self.fill(first, scope, x, kind).replace("{t}", name))
            write(self.fill(pick.choice(_IN_PLACE), scope, x, kind).replace("{t}", name))
        elif draw < 0.86:
            other = into.new()
            write(f"{other} = {self.fill(pick.choice(_FRESH), scope, x, kind)}")
            write(f"{name} = {pick.choice(_READING)}".replace("{t}", other))
            if self.chance(0.4):
                write(f"{name} = torch.sigmoid({name})")
            line = self.fill(pick.choice(_IN_PLACE), scope, x, kind).replace("{t}", other)
            if self.chance(0.4):
                write(f"if {pick.choice(('self.flag', 'self.count % 2', 'self.alpha > 1', f'{x}.sum() > 0'))}:")
                line = f"    {line}"
            write(line)
            scope[other] = kind
        elif into.depth < 3:
            self.region(scope, name, x, kind)
        else:
            write(f"{name} = {x} * 0.9")
        scope[name] = kind
        return name, kind

    def inside(self, scope: dict[str, str], name: str, x: str, kind: str, most: int = 3) -> None:
        """A block of its own, which makes `name` from `x`."""
        self.into.depth += 1
        made = self.block(dict(scope), x, kind, self.pick.randint(1, most))
        self.into.write(f"{name} = {made}")
        self.into.depth -= 1

    def region(self, scope: dict[str, str], name: str, x: str, kind: str) -> None:
        """A branch, loop, context or nested function."""
        write, pick, into = self.into.write, self.pick, self.into
        match pick.choice(_REGIONS):
            case "if":
                tests = ("self.flag", "self.alpha > 1", "self.count % 2", "self.training", "STATE['scale'] > 1")
                write(f"if {pick.choice(tests)}:")
                self.inside(scope, name, x, kind)
                write("else:")
                self.inside(scope, name, x, kind, 2)
            case "data":
                tests = ("{x}.sum() > 0", "({x} > 1.5).any()", "{x}.mean().item() > 0.1", "{x}.detach().max() > 2")
                write(f"if {self.fill(pick.choice(tests), scope, x, kind)}:")
                self.inside(scope, name, x, kind)
                write("else:")
                self.inside(scope, name, x, kind, 2)
            case "for":
                write(f"{name} = {x}")
                lengths = ("2", "self.count", "1 + self.count % 2", f"1 + int({x}.detach().abs().sum()) % 3")
                write(f"for i in range({pick.choice(lengths)}):")
                self.inside({**scope, name: kind}, name, name, kind)
            case "while":
                write(f"{name}, turns_{name} = {x}, 0")
                write(f"while turns_{name} < 3 and {name}.detach().mean() > -0.2:")
                into.depth += 1
                write(f"turns_{name} += 1")
                into.depth -= 1
                self.inside({**scope, name: kind}, name, name, kind, 2)
            case "no_grad":
                write("with torch.no_grad():")
                self.inside(scope, name, x, kind)
                write(f"{name} = {name} + {x}")
            case "dropped":
                write("with torch.no_grad():")
                self.inside(scope, "unused", x, kind)
                write(f"{name} = {x} * 1.1")
            case "enable":
                write("with torch.enable_grad():")
                self.inside(scope, name, x, kind)
            case "autocast":
                enabled = pick.choice(("True", "True", "self.flag", "False"))
                write(f"with torch.autocast('cpu', dtype=torch.bfloat16, enabled={enabled}):")
                self.inside(scope, name, x, kind)
                write(f"{name} = {name}.float()")
            case "try":
                write("try:")
                self.inside(scope, name, x, kind, 2)
                into.depth += 1
                tests = ("{x}.sum() > 0", "self.count == 2", "self.flag")
                write(f"if {self.fill(pick.choice(tests), scope, x, kind)}:")
                write("    raise ValueError('inside')")
                into.depth -= 1
                write("except ValueError:")
                self.inside(scope, name, x, kind, 2)
            case "def":
                function = f"f{into.names}"
                write(f"def {function}(a, scale=self.alpha):")
                self.inside({**scope, "a": kind}, "a", "a", kind)
                write("    return a * scale")
                write(f"{name} = {function}({x})")
                if self.chance(0.3):
                    write(f"{name} = {function}({name}, 0.5)")
            case "checkpoint":
                function = f"f{into.names}"
                write(f"def {function}(a):")
                self.inside({**scope, "a": kind} if self.chance(0.4) else {"a": kind}, "a", "a", kind)
                write("    return a")
                write(f"{name} = checkpoint({function}, {x}, use_reentrant=False)")
            case "raise":
                into.points += 1
                write(f"if self.fail == {into.points}:")
                write("    raise ValueError('on purpose')")
                write(f"{name} = {x} * 1.1")
            case "cond":
                a, b = (self.fill(pick.choice(_ANY), scope, x, kind) for _ in range(2))
                write(f"{name} = {a} if self.flag else {b}")
            case "residual":
                self.indented(scope, name, x, kind)
                write(f"{name} = {name} + {x}")
            case "generator":
                write(f"generator = torch.Generator().manual_seed(self.count + {pick.randint(0, 9)})")
                write(f"{name} = {x} + torch.randn({x}.shape, generator=generator) * 0.1")

    def indented(self, scope: dict[str, str], name: str, x: str, kind: str) -> None:
        """A block that runs anyway."""
        self.into.write("if True:")
        self.inside(scope, name, x, kind)

    def keep(self, scope: dict[str, str], x: str, kind: str) -> None:
        """Keep or read something on the model."""
        write, pick, into = self.into.write, self.pick, self.into
        if into.depth and self.chance(0.5):
            return
        match pick.choice(_KEPT):
            case "calls":
                write("self.calls += 1")
            case "list":
                write(f"self.seen.append({x}.detach())")
            case "number":
                write(f"self.seen.append({x}.mean().item())")
            case "dict":
                write(f"self.table['{x}'] = {x}.detach().clone()")
            case "aux":
                write(f"self.aux = self.aux + {x}.square().mean() * 0.1 if self.calls else {x}.abs().mean()")
            case "ema" if kind == ROWS:
                write(f"self.ema = 0.9 * self.ema + 0.1 * {x}.detach().float().mean(0)")
            case "ema_" if kind == ROWS:
                write("with torch.no_grad():")
                write(f"    self.ema.mul_(0.9).add_({x}.float().mean(0), alpha=0.1)")
            case "hook":
                write(f"if {x}.requires_grad:")
                scale = pick.choice(("0.5", "self.alpha", "STATE['scale']"))
                write(f"    {x}.register_hook(lambda g: g * {scale})")
            case "grads":
                write(f"if {x}.requires_grad:")
                write(f"    {x}.register_hook(lambda g: self.seen.append(g.detach().clone()))")
            case "count":
                write("self.count = (self.count + 1) % 4")
            case "kept":
                write(f"self.kept = {x}")
            case "retain":
                write(f"if {x}.requires_grad:")
                write(f"    {x}.retain_grad()")
                write(f"    self.kept = {x}")
            case "state":
                write(f"if self.state is not None and self.state.shape == {x}.shape:")
                write(f"    {x} = {x} + 0.1 * self.state")
                write(f"self.state = {x}.detach()")
            case "carried":
                write(f"if self.carried is not None and self.carried.shape == {x}.shape:")
                write(f"    {x} = torch.tanh({x} + 0.1 * self.carried)")
                write(f"self.carried = {x}")
            case "global":
                write("STATE['n'] += 1")
            case "print":
                write(f"str({x})")
            case "options":
                write("self.options.n += 1")
            case "nested":
                write("self.sizes['inner'].append(self.calls)")
            case "deque":
                write(f"self.recent.append(float({x}.detach().mean()))")
            case "data":
                write("with torch.no_grad():")
                write(f"    self.buffer.copy_({x}.detach().float().mean().expand(3))")
            case "buffer":
                write("self.buffer = self.buffer + 1")
            case "alias":
                write(f"self.table['view'] = {x}[:1].detach()")
            case "once":
                write("if not hasattr(self, 'cache'):")
                write("    self.cache = torch.linspace(0, 1, 8)")
                if kind != IMAGE:
                    write(f"{x} = {x} + self.cache")

    def text(self, into: _Class, forward: str = "self, x") -> str:
        """The source of a class."""
        lines = [f"class {into.name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        self.{name} = {made}" for name, (made, _) in into.layers.items()]
        lines += [
            f"        self.{name} = nn.Parameter(torch.randn({shape}) * 0.3)" for name, shape in into.parameters.items()
        ]
        lines += [
            "        self.register_buffer('ema', torch.zeros(8))",
            "        self.register_buffer('mean8', torch.zeros(8))",
            "        self.register_buffer('var8', torch.ones(8))",
            "        self.register_buffer('buffer', torch.zeros(3))",
            "        self.plain8 = torch.linspace(0.5, 1, 8)",
            "        self.alpha, self.rate, self.flag, self.count, self.fail = 0.8, 0.2, True, 1, 0",
            "        self.calls, self.seen, self.table, self.aux, self.kept = 0, [], {}, 0.0, None",
            "        self.state, self.carried = None, None",
            "        self.options, self.sizes = types.SimpleNamespace(scale=1.2, n=0), {'a': 0.9, 'inner': []}",
            "        self.recent = collections.deque(maxlen=3)",
            "",
            f"    def forward({forward}):",
            *into.lines,
        ]
        return "\n".join(lines)

    # The loop

    def program(self) -> str:
        """The whole program."""
        pick = self.pick
        kind = pick.choice((ROWS, ROWS, SEQUENCE, IMAGE))
        scope = {"x": kind}
        more = pick.choice(("", "", "y", "factor"))
        forward = {"": "self, x", "y": "self, x, y=None", "factor": "self, x, factor=1.0"}[more]
        first = "x"
        if more == "y":
            self.into.write("v0 = x if y is None else x + y")
            first, scope["v0"] = "v0", kind
        elif more == "factor":
            self.into.write("v0 = x * factor")
            first, scope["v0"] = "v0", kind
        last = self.block(scope, first, kind, pick.randint(4, 16))
        if kind != ROWS:
            last = self.converted(scope, last, kind, ROWS)
        self.into.layers["head"] = "nn.Linear(8, 5)", "head"
        returns = (
            "return self.head({})",
            "return self.head({})",
            "return self.head({0}), {0}",
            "return {{'out': self.head({0}), 'hidden': {0}, 'n': self.calls}}",
            "return [self.head({0}).relu(), None]",
        )
        self.into.write(pick.choice(returns).format(last))
        net = self.text(self.into, forward)
        loop = "\n".join(self.loop(kind, more))
        classes = "\n\n\n".join([*reversed(self.parts), net])
        return f"{_HEADER.strip()}\n\n\n{classes}\n\n\n{loop}\n"

    def loop(self, kind: str, more: str) -> list[str]:
        """The training program."""
        pick = self.pick
        shape = {ROWS: "8", SEQUENCE: "4, 8", IMAGE: "4, 8, 8" if self.chance(0.5) else "4, 4, 4"}[kind]
        size = pick.choice((3, 4, 6))
        varies = self.chance(0.3)
        grad = ".requires_grad_()" if self.chance(0.2) else ""
        last = ".contiguous(memory_format=torch.channels_last)" if kind == IMAGE and self.chance(0.2) else ""
        self.kind = kind
        lines = [
            f"def batch(step, size={size}):",
            f"    x = torch.randn(size, {shape}, generator=torch.Generator().manual_seed(step)){last}",
            f"    return x{grad}",
            "",
            "",
            "def program(run):",
            "    model, handles = Net(), []",
        ]
        self.more = more
        self.size = size
        self.varies = varies
        self.hooks = 0
        out = [*lines]
        self.out = out
        add = self.add
        if self.chance(0.15):
            self.change()
        given = self.arguments("0")
        add(f"run.manage(model, *given({given}))")
        add("STATE.update(scale=1.0, n=0)")
        optimizers = (
            "torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)",
            "torch.optim.SGD(model.parameters(), 0.1)",
            "torch.optim.Adam(model.parameters(), 0.01)",
            "torch.optim.AdamW(model.parameters(), 0.01)",
            "torch.optim.RMSprop(model.parameters(), 0.005)",
        )
        add(f"optimizer = {pick.choice(optimizers)}")
        for step in range(4):
            add(f"# step {step}")
            if self.chance(0.06):
                add("release(run, model)")
                add(f"run.manage(model, *given({self.arguments(str(step))}))")
            for _ in range(pick.choice((0, 0, 1, 1, 2, 3))):
                self.change()
            self.step(step)
        add("run.note_model(model)")
        add("note_attributes(run, model)")
        return out

    def add(self, line: str, depth: int = 1) -> None:
        """One line of the loop."""
        self.out.append("    " * depth + line)

    def arguments(self, step: str) -> str:
        """The arguments of a call of the model."""
        size = f", {self.pick.choice((2, 3, 5, 7))}" if self.varies and self.chance(0.6) else ""
        given = f"batch({step}{size})"
        if self.more == "y" and self.chance(0.4):
            given += f", y=batch({step} + 50{size})" if self.chance(0.5) else f", batch({step} + 50{size})"
        elif self.more == "factor" and self.chance(0.5):
            given += f", factor={self.pick.choice((0.5, 1.0, 2.0))}"
        return given

    def step(self, step: int) -> None:
        """One step of the loop."""
        pick, add, change = self.pick, self.add, self.change
        number = str(step)
        around = ""
        if self.chance(0.1):
            around = "with torch.autocast('cpu', dtype=torch.bfloat16):"
        if self.into.points and self.chance(0.35):
            add(f"model.fail = {pick.randint(1, self.into.points)}")
            add("try:")
            add(f"model({self.arguments(number)})", 2)
            add("except ValueError as error:")
            add("run.note(str(error))", 2)
            add("model.fail = 0")
        if self.chance(0.1):
            add("with torch.no_grad():")
            add(f"run.note(square_of(model({self.arguments(number + ' + 20')})))", 2)
        add("reset(model)")
        inputs = f"x{step}"
        given = self.arguments(number)
        first, _, rest = given.partition(")")
        add(f"{inputs} = {first})")
        call = f"model({inputs}{rest})"
        if around:
            add(around)
        add(f"out = {call}", 2 if around else 1)
        way = pick.choice(
            ("plain",) * 6
            + ("two", "other order", "retain", "accumulate", "double", "grads", "dropped", "inputs", "twice", "aux")
            + ("between", "between", "between", "evaluated", "hooked", "late")
        )
        zero = pick.choice(("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "model.zero_grad()"))
        if way != "accumulate" and self.chance(0.9):
            add(zero)
        match way:
            case "two":
                add(f"other = model({self.arguments(number + ' + 10')})")
                add("loss = square(out) + square(other)")
                add("loss.backward()")
            case "other order":
                add("reset(model)")
                add(f"other = model({self.arguments(number + ' + 10')})")
                add("loss, second = square(out), square(other)")
                order = ["loss.backward()", "second.backward()"]
                pick.shuffle(order)
                add(order[0])
                change(between=True)
                add(order[1])
            case "retain":
                add("loss = square(out)")
                add("loss.backward(retain_graph=True)")
                add("run.note_model(model)")
                if self.chance(0.5):
                    change(between=True)
                add("(loss * 2).backward()")
            case "twice":
                add("loss = square(out)")
                add("grads = torch.autograd.grad(loss, trained(model), retain_graph=True, allow_unused=True)")
                add("run.note(*grads)")
                add("loss.backward()")
            case "double":
                add("loss = square(out)")
                add("grads = torch.autograd.grad(loss, trained(model), create_graph=True, allow_unused=True)")
                add("run.note(*grads)")
                add("total = loss + sum(g.square().mean() for g in grads if g is not None)")
                add("total.backward()")
            case "grads":
                add("loss = square(out)")
                add("grads = torch.autograd.grad(loss, trained(model), allow_unused=True)")
                add("run.note(*grads)")
            case "dropped":
                add("loss = square(out)")
                add("del out")
            case "inputs":
                add("loss = square(out)")
                add(f"if {inputs}.requires_grad:")
                add(f"run.note(*torch.autograd.grad(loss, [{inputs}], allow_unused=True))", 2)
                add("else:")
                add("loss.backward()", 2)
            case "aux":
                add("loss = square(out) + model.aux")
                add("loss.backward()")
            case "between":
                add("loss = square(out)")
                for _ in range(pick.randint(1, 3)):
                    change(between=True)
                add("loss.backward()")
            case "evaluated":
                add("model.eval()")
                add("with torch.no_grad():")
                add(f"run.note(square_of(model({self.arguments(number + ' + 30')})))", 2)
                add("model.train()")
                add("loss = square(out)")
                add("loss.backward()")
            case "hooked":
                add("loss = square(out)")
                add("loss.register_hook(lambda g: g * 0.5)")
                add("loss.backward()")
            case "late":
                add("loss = square(out)")
                add("reset(model)")
                add(f"later = model({self.arguments(number + ' + 40')})")
                add("loss.backward()")
                add("run.note_model(model)")
                add("square(later).backward()")
            case _:
                add("loss = square(out)")
                add("loss.backward()")
        add("run.note(loss=loss)")
        add("run.note_model(model)")
        if self.chance(0.9):
            add("optimizer.step()")
        add("note_attributes(run, model)")
        if self.chance(0.05):
            add("model = copied(run, model)")
            add("optimizer = torch.optim.SGD(model.parameters(), 0.05)")

    def nested_parts(self) -> list[str]:
        """Parts of the model that carry something along."""
        return [f"model.{name}" for name, (made, _) in self.into.layers.items() if made.startswith("Part")]

    def change(self, *, between: bool = False) -> None:
        """Something the loop changes; `between` a forward and its backward."""
        pick, add = self.pick, self.add
        layers = self.into.layers
        plain = [n for n, (made, _) in layers.items() if n != "head" and made.startswith("nn.")]
        single = [n for n in plain if not layers[n][0].startswith(("nn.Module", "nn.GRU(", "nn.LSTM", "nn.Multi"))]
        name = pick.choice(single) if single else "head"
        holders = ["model", *self.nested_parts()]
        holder = pick.choice(holders)
        match pick.choice(_CHANGES):
            case "alpha":
                add(f"{holder}.alpha = {pick.choice((0.3, 1.5, -1.0, 0.8))}")
            case "flag":
                add(f"{holder}.flag = not {holder}.flag")
            case "count":
                add(f"{holder}.count = {pick.randint(0, 3)}")
            case "scale":
                add(f"STATE['scale'] = {pick.choice((0.5, 1.5))}")
            case "options":
                add(f"{holder}.options.scale = {pick.choice((0.5, 1.5))}")
            case "sizes":
                add(f"{holder}.sizes['a'] = {pick.choice((0.5, 1.5))}")
            case "rate":
                add(f"{holder}.rate = {pick.choice((0.0, 0.5))}")
            case "mode":
                add(f"model.train({pick.choice(('True', 'False', 'not model.training'))})")
            case "layer_mode":
                add(f"model.{name}.train(not model.{name}.training)")
            case "freeze":
                add(f"model.{name}.requires_grad_({name == 'head'})")
            case "unfreeze":
                add("model.requires_grad_(True)")
            case "swap" if name != "head" and not between:
                add(f"model.{name} = {layers[name][0]}")
            case "swap" if name != "head":
                add(f"model.{name} = {layers[name][0]}.eval()")
            case "hook":
                results = ("o * 1.1", "None", "torch.tanh(o)", "o + a[0].mean()", "model.seen.append(float(o.mean()))")
                add(f"handles.append(model.{name}.register_forward_hook(lambda m, a, o: {pick.choice(results)}))")
            case "pre":
                results = ("(a[0] * 1.1, *a[1:])", "None")
                add(f"handles.append(model.{name}.register_forward_pre_hook(lambda m, a: {pick.choice(results)}))")
            case "backward":
                made = layers[name][0]
                if "inplace" not in made and "Sequential" not in made:
                    results = ("None", "tuple(None if t is None else t * 0.5 for t in i)")
                    add(
                        f"handles.append(model.{name}.register_full_backward_hook(lambda m, i, o: "
                        f"{pick.choice(results)}))"
                    )
            case "unhook":
                add("if handles:")
                add("handles.pop().remove()", 2)
            case "dropout":
                add("for m in model.modules():")
                add("if isinstance(m, nn.Dropout):", 2)
                add(f"m.p = {pick.choice((0.0, 0.4))}", 3)
            case "eps":
                add("for m in model.modules():")
                add("if hasattr(m, 'eps') and m.eps is not None:", 2)
                add("m.eps *= 10", 3)
            case "inplace" if not between:
                add("for m in model.modules():")
                add("if isinstance(m, nn.ReLU):", 2)
                add("m.inplace = not m.inplace" if self.chance(0.2) else "m.inplace = False", 3)
            case "draw":
                add(pick.choice(("torch.rand(3)", "random.random()", "np.random.rand(2)", "torch.manual_seed(5)")))
            case "seen":
                add("model.seen.clear()")
            case "buffer":
                add(f"{holder}.ema = torch.full((8,), 0.2)")
            case "written":
                add("with torch.no_grad():")
                add(f"{holder}.{pick.choice(('ema', 'mean8', 'buffer', 'plain8'))}.add_(0.1)", 2)
            case "plain8":
                add(f"{holder}.plain8 = torch.linspace(0, 1, 8)")
            case "weights" if not between:
                add("with torch.no_grad():")
                add("for p in model.parameters():", 2)
                add("p.mul_(0.9)", 3)
            case "data" if name == "head" or not between:
                add(f"for p in model.{name}.parameters():")
                add("p.data = p.data * 0.9", 2)
            case "method" if not between:
                add(f"model.{name}.forward = scaled(model.{name}.forward)")
            case "format" if self.kind == IMAGE and not between:
                add("model.to(memory_format=torch.channels_last)")
            case "parametrize" if layers[name][0] == "nn.Linear(8, 8)" and not between:
                add(f"if not parametrize.is_parametrized(model.{name}):")
                add(f"parametrizations.weight_norm(model.{name})", 2)
            case "raising" if not between:
                add(f"handles.append(model.{name}.register_forward_hook(refuse))")
                add("try:")
                add(f"model({self.arguments('70')})", 2)
                add("except ArithmeticError as error:")
                add("run.note(str(error))", 2)
                add("handles.pop().remove()")
            case "state":
                add("model.state = None")
            case "forward":
                add("with torch.no_grad():")
                add(f"run.note(square_of(model({self.arguments('60')})))", 2)
            case "part" if name != "head" and layers[name][1] in (ROWS, SEQUENCE, IMAGE) and not between:
                shape = {ROWS: "3, 8", SEQUENCE: "3, 4, 8", IMAGE: "3, 4, 4, 4"}[layers[name][1]]
                made = layers[name][0]
                if not made.startswith(("nn.GRUCell", "nn.RNNCell", "nn.Bilinear")):
                    add(f"run.note(model.{name}(torch.ones({shape})))")


def draw(seed: int) -> str:
    """The source of a program."""
    return _Writer(seed).program()


def mode_of(seed: int) -> str:
    """The policies under which a program runs."""
    return random.Random(f"mode {seed}").choice(_MODES)


# What the programs call


def _release(run: Run, model: nn.Module) -> None:
    """Let go of a model that is managed."""
    if run.mode is not None:
        outcore.release(model)
        run.managed = [m for m in run.managed if m is not model]


def _copied(run: Run, model: nn.Module) -> nn.Module:
    """A copy of a model, which goes on instead."""
    model.seen, model.kept, model.aux, model.carried, model.state = [], None, 0.0, None, None  # type: ignore[assignment]
    for part in model.modules():
        if hasattr(part, "carried"):
            part.seen, part.kept, part.aux, part.carried = [], None, 0.0, None  # type: ignore[assignment]
    return copy.deepcopy(model)


def _reset(model: nn.Module) -> None:
    """Let go of what is carried from call to call with its graph."""
    for part in model.modules():
        if hasattr(part, "carried"):
            part.carried, part.aux = None, 0.0  # type: ignore[assignment]


def _square_of(output: Any) -> torch.Tensor:
    """A number of what a model returns without gradients."""
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    if isinstance(output, dict):
        output = list(output.values())
    return torch.stack([_square_of(o) for o in output if isinstance(o, torch.Tensor)]).sum()


def _note_attributes(run: Run, model: nn.Module) -> None:
    """Note what forward left on the model and its parts."""
    for part in model.modules():
        if not hasattr(part, "recent"):
            continue
        kept: Any = part.kept
        run.note(part.calls, part.count, part.options.n, list(part.recent), list(part.sizes["inner"]))  # type: ignore
        run.note(*part.seen, *part.table.values(), part.aux, part.state, kept)  # type: ignore
        if isinstance(kept, torch.Tensor):
            run.note(kept.requires_grad)
            if kept.retains_grad:
                run.note(kept.grad)


def _refuse(*_: Any) -> None:
    raise ArithmeticError("a hook refuses")


def _scaled(forward: Any) -> Any:
    return lambda *args, **kwargs: forward(*args, **kwargs) * 1.2


def _names() -> dict[str, Any]:
    return {
        "checkpoint": checkpoint,
        "collections": collections,
        "copied": _copied,
        "F": F,
        "given": lambda *args, **kwargs: (args, kwargs),
        "nn": nn,
        "note_attributes": _note_attributes,
        "np": np,
        "parametrizations": parametrizations,
        "parametrize": parametrize,
        "random": random,
        "refuse": _refuse,
        "release": _release,
        "reset": _reset,
        "scaled": _scaled,
        "square": square,
        "square_of": _square_of,
        "torch": torch,
        "trained": lambda model: [p for p in model.parameters() if p.requires_grad],
        "types": types,
    }


# How a program ends


@dataclass
class Outcome:
    """How a program ended."""

    seed: int
    mode: str
    ended: str
    """"same", "plain refuses", "plain differs from itself", "differs" or "raises"."""
    told: str = ""

    @property
    def found(self) -> bool:
        """Whether it is a finding."""
        return self.ended in ("differs", "raises")


_DEVICE = torch.device("cpu")
"""Where programs make their models and data."""


def _run(source: str, mode: str | None, seed: int, name: str) -> tuple[Run, BaseException | None]:
    """Run a program from one random state."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**31)
    run = Run(mode, seed)
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    space: dict[str, Any] = {**_names(), "__name__": "drawn"}
    if _DEVICE.type != "cpu":  # a generator does not follow the default device
        source = source.replace("torch.Generator()", f"torch.Generator({str(_DEVICE)!r})")
    error: BaseException | None = None
    with warnings.catch_warnings(), contextlib.nullcontext() if _DEVICE.type == "cpu" else _DEVICE:
        warnings.simplefilter("ignore")
        exec(compile(source, name, "exec"), space)
        try:
            space["program"](run)
        except Exception as raised:
            error = raised
        for model in run.managed:
            outcore.release(model)
    return run, error


def outcome(seed: int, mode: str | None = None, source: str | None = None) -> Outcome:
    """Run a program plainly and under policies."""
    source, mode = source or draw(seed), mode or mode_of(seed)
    name = f"<drawn {seed}>"
    plain, refused = _run(source, None, seed, name)
    managed, raised = _run(source, mode, seed, name)
    if refused is not None:
        told = "".join(traceback.format_exception(refused)[-3:])
        common = min(len(plain.notes), len(managed.notes))
        plain.notes, managed.notes = plain.notes[:common], managed.notes[:common]
        if not differences(plain, managed):
            return Outcome(seed, mode, "plain refuses", told)
    elif raised is not None:
        told = "".join(traceback.format_exception(raised))
        return Outcome(seed, mode, "raises", told)
    elif not differences(plain, managed):
        return Outcome(seed, mode, "same")
    again, _ = _run(source, None, seed, name)
    again.notes = again.notes[: len(plain.notes)]
    if differences(plain, again):
        return Outcome(seed, mode, "plain differs from itself")
    found = differences(plain, managed)
    return Outcome(seed, mode, "differs", f"{len(found)} of {len(plain.notes)} notes: {', '.join(found[:8])}")


def _main(arguments: list[str]) -> int:
    """Print one program and how it ended, or run a range of them."""
    faulthandler.enable()
    torch.set_num_threads(1)
    if "--device" in arguments:
        global _DEVICE
        at = arguments.index("--device")
        _DEVICE, arguments = torch.device(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]
        torch.use_deterministic_algorithms(True, warn_only=True)
    first = int(arguments[0])
    if len(arguments) < 2 or not arguments[1].isdigit():
        mode = arguments[1] if len(arguments) > 1 else None
        print(draw(first))
        print(outcome(first, mode))
        return 0
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(first, int(arguments[1])):
        faulthandler.dump_traceback_later(120, exit=True)
        ended = outcome(seed, arguments[2] if len(arguments) > 2 else None)
        counts[ended.ended] += 1
        if ended.found or ended.ended == "plain refuses":
            last = ended.told.strip().splitlines()
            print(seed, ended.mode, ended.ended, last[-1][:200] if last else "", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
