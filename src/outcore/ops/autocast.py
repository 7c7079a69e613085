"""What autocast does with an operation on a GPU: torch's lists for CUDA (those for a CPU differ).

Matrix work is done in the small type, so its operands are cast down; norms, softmax, losses and some functions are
computed in float32, so their inputs are cast up. Everything else takes what it is given.
"""

from __future__ import annotations

from typing import Literal

from outcore.ops.registry import Facet, kinds

__all__ = ["AUTOCAST", "CAST_DOWN", "CAST_UP"]

AUTOCAST: Facet[Literal["down", "up"]] = Facet("autocast", "the direction in which autocast casts its operands")
AUTOCAST.add("down", *kinds("convolution", "transposed convolution"), "linear", "transposed_linear")
AUTOCAST.add("down", "matmul", "bmm", "baddbmm", "mm", "scaled_dot_product_attention")
AUTOCAST.add("up", "layer_norm", "group_norm", "rms_norm", "softmax", "log_softmax", "softplus")
AUTOCAST.add("up", "cross_entropy", "nll_loss", "mse_loss", "l1_loss")
AUTOCAST.add("up", "pow", "exp", "log", "sum", "prod", "norm", "cumsum")

CAST_DOWN = AUTOCAST.where(lambda way: way == "down")
"""Names of operations whose operands are cast to the small type."""
CAST_UP = AUTOCAST.where(lambda way: way == "up")
"""Names of operations that are computed in float32."""
