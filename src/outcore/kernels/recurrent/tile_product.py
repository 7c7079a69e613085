"""Products of tiles on tensor cores, as exact as float32; used inside the other Triton kernels.

A float32 number is split into three bfloat16 pieces, and a product of two tiles is the six products of pieces that are
not below rounding. (Three TF32 products are as many operations, but TF32 operands take four times as long to load from
shared memory.) PRECISION is "full" for that, "bf16" for the first piece alone, else as `tl.dot` names it; float64 is
"ieee". This module imports Triton and is imported only where it is about to be used.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _split(x, PRECISION: tl.constexpr):
    """What products are made of: a float32 number's leading eight bits, the next, the rest; or itself."""
    if PRECISION == "full":
        x0 = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        rest = x - x0
        x1 = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        return x0.to(tl.bfloat16), x1.to(tl.bfloat16), (rest - x1).to(tl.bfloat16)
    elif PRECISION == "bf16":
        x0 = x.to(tl.bfloat16)
        return x0, x0, x0
    else:
        return x, x, x


@triton.jit
def _product(x, w, PRECISION: tl.constexpr, CHAINS: tl.constexpr):
    """Product of two split tiles. Two chains of three products wait less for each other than one of six, but have to be
    added up: in the kernels of gates, which have other work meanwhile, one is faster; in sweeps it matters little."""
    x0, x1, x2 = x
    w0, w1, w2 = w
    if PRECISION == "full":
        small = tl.dot(x2, w0, tl.dot(x0, w2, tl.dot(x1, w1)))
        if CHAINS == 1:
            return tl.dot(x0, w0, tl.dot(x1, w0, tl.dot(x0, w1, small)))
        else:
            return small + tl.dot(x0, w0, tl.dot(x1, w0, tl.dot(x0, w1)))
    elif PRECISION == "bf16":
        return tl.dot(x0, w0)
    else:
        return tl.dot(x0, w0, input_precision=PRECISION, out_dtype=x0.dtype)


@triton.jit
def _dot(x, w, PRECISION: tl.constexpr, CHAINS: tl.constexpr = 2):
    """Product of two tiles."""
    return _product(_split(x, PRECISION), _split(w, PRECISION), PRECISION, CHAINS)


@triton.jit
def _turned_product(x, w, PRECISION: tl.constexpr):
    """``xᵀ w`` of split tiles; they are turned on their way through shared memory."""
    x0, x1, x2 = x
    return _product((tl.trans(x0), tl.trans(x1), tl.trans(x2)), w, PRECISION, 2)


@triton.jit
def _inputs(x, some, q, H: tl.constexpr, IN: tl.constexpr):
    """Inputs of some rows for `_columns`, from pointers to the rows' [R, 1]."""
    if IN == 1:
        return tl.load(x, mask=some, other=0.0)
    else:
        return tl.load(x + q - H, mask=some & (q >= H) & (q < H + IN), other=0.0)


@triton.jit
def _columns(h, u, q, H: tl.constexpr, IN: tl.constexpr):
    """What the gradients of gates are multiplied with: states (zero from column H on), then inputs, then one."""
    if IN == 1:
        h = tl.where(q == H, u, h)
    else:
        h += u
    return tl.where(q == H + IN, 1.0, h).to(h.dtype)
