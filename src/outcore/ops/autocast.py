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


def _cast(wanted: str) -> frozenset[str]:
    """Names under which they are recorded, but for in-place forms, which write the type they are given."""
    return frozenset(type_ for type_ in AUTOCAST.where(lambda way: way == wanted) if not type_.endswith("_"))


CAST_DOWN = _cast("down")
"""Names of operations whose operands are cast to the small type."""
CAST_UP = _cast("up")
"""Names of operations that are computed in float32."""
