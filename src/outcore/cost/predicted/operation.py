"""An operation: what one layer computes, described without a tensor.

The time of a layer depends on a few sizes: channels, image, kernel, batch, precision, memory format. An
`Operation` holds exactly those, and answers the two questions every analytic cost starts from: how many
floating-point operations (a multiply and an add are two, counted as `torch.utils.flop_counter` counts them),
and how many bytes must at least cross the memory bus (each operand read once, each result written once; a
pass over data that a kernel cannot avoid counts).

Only matrix work has FLOPs here. Norms, pools and element-wise operations are bound by memory, and their
arithmetic is part of the efficiency that a calibration measures.

How the fields read for each kind:

    kind                   batch     in_channels  out_channels  size             groups   variant
    conv, conv_transpose   images    channels     channels      image            groups
    linear                 rows      features     features      further rows
    matmul                 matrices  inner size   columns       (rows,)
    attention              samples   head size    value size    (queries, keys)  heads    "" or "causal"
    norm                   samples   channels     = channels    image            groups   batch, layer, group, …
    pool                   samples   channels     = channels    image                     max, avg
    elementwise, copy      samples   channels     = channels    image                     relu, gelu, add, …
    softmax                rows      row length   = row length  further rows
    embedding              rows      vocabulary   features      further rows
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from outcore.errors import MachineError
from outcore.machine.device import ELEMENT_BYTES, precision_of

Kind = Literal[
    "conv",
    "conv_transpose",
    "linear",
    "matmul",
    "attention",
    "norm",
    "pool",
    "elementwise",
    "softmax",
    "embedding",
    "copy",
]
Direction = Literal["forward", "backward"]

KINDS: tuple[Kind, ...] = get_args(Kind)
_FEW = 4
"""Channels of an image that a first layer sees, at most."""
MATRIX_KINDS: frozenset[str] = frozenset({"conv", "conv_transpose", "linear", "matmul", "attention"})
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("", "causal"),
    "norm": ("batch", "layer", "group", "instance", "rms"),
    "pool": ("max", "avg"),
    "elementwise": ("relu", "gelu", "silu", "sigmoid", "hardswish", "add", "mul", "dropout"),
    "copy": ("", "layout"),
}

_INDEX_BYTES = 8
_IMAGE_FIELDS = ("kernel", "stride", "padding", "dilation", "output_padding")
# Passes over the tensor: reads and writes of one tensor each. BatchNorm must see all of a channel before it
# can normalise any of it, so its input is read twice; its backward reads input and gradient twice.
# The gradient of a sum or of a copy is the gradient itself, handed on without moving it.
_FORWARD_PASSES = {"batch": 3, "add": 3, "mul": 3}
_BACKWARD_PASSES = {"batch": 5, "add": 0, "mul": 5, "dropout": 2}


@dataclass(frozen=True, slots=True)
class Operation:
    """One layer in one direction.

    >>> image = dict(kernel=(7, 7), stride=(2, 2), padding=(3, 3))
    >>> conv = Operation("conv", batch=8, in_channels=3, out_channels=64, size=(224, 224), **image)
    >>> conv.out_size, conv.flops == 2 * 8 * 64 * 112 * 112 * 3 * 7 * 7
    ((112, 112), True)
    """

    kind: Kind
    batch: int = 1
    in_channels: int = 1
    out_channels: int = 0
    size: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    variant: str = ""
    dtype: str = "fp32"
    """A precision (`tf32` for float32 tensors multiplied in TF32)."""
    channels_last: bool = False
    direction: Direction = "forward"
    input_grad: bool = True
    """Whether backward computes the gradient of the input; a network's first layer does not."""
    weight_grad: bool = True
    """Whether backward computes the gradient of the weight; of a frozen layer it does not."""
    bias: bool = True
    """Whether a convolution adds a bias, which is a pass over its output of its own."""

    def __post_init__(self) -> None:
        def fill(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if self.kind not in KINDS:
            raise MachineError(f"unknown kind of operation {self.kind!r}; known are {', '.join(KINDS)}")
        if self.variant not in VARIANTS.get(self.kind, ("",)):
            known = ", ".join(VARIANTS.get(self.kind, ('""',)))
            raise MachineError(f"unknown variant {self.variant!r} of {self.kind}; known are {known}")
        fill("dtype", precision_of(self.dtype))
        fill("out_channels", self.out_channels or self.in_channels)
        for name in ("size", *_IMAGE_FIELDS):
            fill(name, tuple(int(n) for n in getattr(self, name)))
        if self.kind in ("conv", "conv_transpose", "pool"):
            for name in _IMAGE_FIELDS:
                default = 0 if "padding" in name else 1
                fill(name, getattr(self, name) or (default,) * len(self.size))
                if len(getattr(self, name)) != len(self.size):
                    raise MachineError(f"{name} {getattr(self, name)} does not fit an image of size {self.size}")
        numbers = (self.batch, self.in_channels, self.out_channels, self.groups, *self.size, *self.kernel)
        if min(numbers) < 1 or (self.out_size and min(self.out_size) < 1):
            raise MachineError(f"an operation needs sizes of at least 1, got {self}")
        if self.kind.startswith("conv") and (self.in_channels % self.groups or self.out_channels % self.groups):
            channels = f"{self.in_channels} and {self.out_channels}"
            raise MachineError(f"{channels} channels cannot be split into {self.groups} groups")

    @property
    def out_size(self) -> tuple[int, ...]:
        """Size of the output image; the same as `size` where an operation keeps it."""
        image = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, strict=False)
        if self.kind == "conv_transpose":
            sides = ((n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in image)
            return tuple(side + extra for side, extra in zip(sides, self.output_padding, strict=False))
        if self.kind in ("conv", "pool"):
            return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in image)
        return self.size

    @property
    def in_elements(self) -> int:
        """Elements of all activations that are read; the indices, for an embedding."""
        if self.kind == "attention":
            queries, keys = self.size
            return (
                self.batch * self.groups * (queries * self.in_channels + keys * (self.in_channels + self.out_channels))
            )
        if self.kind == "matmul":
            return self.batch * self.in_channels * (self.size[0] + self.out_channels)
        if self.kind == "embedding":
            return self.batch * math.prod(self.size)
        return self.batch * self.in_channels * math.prod(self.size)

    @property
    def out_elements(self) -> int:
        """Elements of the output."""
        if self.kind == "attention":
            return self.batch * self.groups * self.size[0] * self.out_channels
        return self.batch * self.out_channels * math.prod(self.out_size)

    @property
    def weight_elements(self) -> int:
        """Elements of the weight, without bias."""
        if self.kind in ("conv", "conv_transpose"):
            return self.in_channels * self.out_channels // self.groups * math.prod(self.kernel)
        if self.kind in ("linear", "embedding"):
            return self.in_channels * self.out_channels
        return 0

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix work."""
        if self.kind not in MATRIX_KINDS:
            return 0
        products = 2 if self.kind == "matmul" else self.input_grad + self.weight_grad
        if self.kind == "attention":
            return self._attention_flops()
        return 2 * self._multiplies() * (products if self.direction == "backward" else 1)

    def _multiplies(self) -> int:
        if self.kind == "conv":
            return self.batch * math.prod(self.out_size) * self.weight_elements
        if self.kind == "conv_transpose":
            return self.batch * math.prod(self.size) * self.weight_elements
        return self.batch * math.prod(self.size) * self.in_channels * self.out_channels

    def _attention_flops(self) -> int:
        queries, keys = self.size
        pairs = queries * keys
        if self.variant == "causal":
            pairs -= sum(max(0, keys - 1 - row) for row in range(min(queries, keys)))
        scores, values = 2 * pairs * self.in_channels, 2 * pairs * self.out_channels
        # Backward computes the scores again, then the gradients of values, probabilities, queries and keys.
        each = scores + values if self.direction == "forward" else 3 * scores + 2 * values
        return self.batch * self.groups * each

    @property
    def nbytes(self) -> int:
        """The least bytes that must be read from and written to the device's memory."""
        element = ELEMENT_BYTES[self.dtype]
        x, w, y = self.in_elements, self.weight_elements, self.out_elements
        forward = self.direction == "forward"
        if self.kind == "pool":
            indices = _INDEX_BYTES * y if self.variant == "max" else 0
            return (x + y) * element + indices
        if self.kind == "embedding":
            return x * _INDEX_BYTES + (2 * y if forward else 3 * y + w) * element
        if self.kind in MATRIX_KINDS:
            if forward:
                return (x + w + y) * element
            if self.kind == "attention":
                return (2 * x + 2 * y) * element
            both = (self.input_grad and self.weight_grad) or self.kind == "matmul"
            return (x + w + y) * element * (2 if both else 1)
        if self.kind == "copy" and not forward:
            return 0
        passes = _FORWARD_PASSES.get(self.variant, 2) if forward else _BACKWARD_PASSES.get(self.variant, 3)
        mask = x if self.variant == "dropout" else 0
        return passes * x * element + mask

    def backward(self) -> Operation:
        """The same operation in the backward direction."""
        return replace(self, direction="backward")

    @property
    def family(self) -> str:
        """Operations that share kernels: the kind, and of convolutions those of single channels, first layers, which
        see a few, and ordinary ones of images, by themselves."""
        if self.kind == "conv" and self.groups > 1 and self.groups == self.in_channels:
            return "depthwise"
        if self.kind != "conv" or self.groups > 1 or len(self.size) != 2:
            return self.kind
        return "first" if self.in_channels <= _FEW else "dense"

    @property
    def part(self) -> str:
        """The direction, or the one of backward's two products that is computed."""
        if self.direction == "forward" or self.kind not in ("conv", "conv_transpose", "linear"):
            return self.direction
        return "backward" if self.input_grad and self.weight_grad else "weight" if self.weight_grad else "input"

    def parts(self) -> tuple[Operation, ...]:
        """A backward operation as its two products, without bias; itself if it is only one."""
        if self.part != "backward" or self.kind not in ("conv", "conv_transpose"):
            return (self,)
        return replace(self, input_grad=False, bias=False), replace(self, weight_grad=False, bias=False)

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        plain: dict[str, Any] = {"kind": self.kind}
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default and not (field.name == "out_channels" and value == self.in_channels):
                plain[field.name] = list(value) if isinstance(value, tuple) else value
        return plain

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Operation:
        """The operation that `to_json` described."""
        try:
            values: Any = {key: tuple(v) if isinstance(v, list) else v for key, v in document.items()}
            return cls(**values)
        except TypeError as error:
            raise MachineError(f"not an operation: {document} ({error})") from error

    def __str__(self) -> str:
        parts = [
            self.variant + " " * bool(self.variant) + self.kind,
            f"{self.in_channels}->{self.out_channels}",
        ]
        named = {"kernel": self.kernel, "stride": self.stride, "dilation": self.dilation}
        parts += [f"{name} {'x'.join(map(str, v))}" for name, v in named.items() if v and set(v) != {1}]
        parts += [f"groups {self.groups}"] * (self.groups > 1)
        parts.append(f"on {'x'.join(map(str, (self.batch, *self.size)))} {self.dtype}")
        parts += ["channels last"] * self.channels_last
        return " ".join([*parts, self.direction])
