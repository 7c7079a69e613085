"""The arguments of each operation by name: in the order in which its function takes them, with their defaults.

A layer has the same as attributes, so a rule asks for ``stride`` and need not know whether it is the attribute of a
layer, the fourth argument of a function, or left out.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outcore.ops.registry import Facet, kinds


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a function.

    >>> SIGNATURES.find("conv2d").bound(("x", "w", None, 2), {"groups": 4})["stride"]
    2
    """

    names: tuple[str, ...]
    defaults: Mapping[str, Any]

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What a call gives by name, with the defaults of what it leaves out."""
        return {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}

    def words(self) -> tuple[str, ...]:
        """Its names."""
        return self.names


SIGNATURES: Facet[Signature] = Facet("arguments", "the arguments of its function, in order")


def _takes(text: str, *operations: str) -> None:
    pairs = [row.partition("=")[::2] for row in text.split()]
    defaults = {name: ast.literal_eval(value) for name, value in pairs if value}
    SIGNATURES.add(Signature(tuple(name for name, _ in pairs), defaults), *operations)


_takes("input weight bias=None stride=1 padding=0 dilation=1 groups=1", *kinds("convolution"))
_takes(
    "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1", *kinds("transposed convolution")
)
_takes("input weight bias=None", "linear")
_takes(
    "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-05",
    *("batch_norm", "sync_batch_norm"),
)
_takes(
    "input running_mean=None running_var=None weight=None bias=None use_input_stats=True momentum=0.1 eps=1e-05",
    "instance_norm",
)
_takes("input normalized_shape weight=None bias=None eps=1e-05", "layer_norm")
_takes("input normalized_shape weight=None eps=None", "rms_norm")
_takes("input num_groups weight=None bias=None eps=1e-05", "group_norm")
_takes("input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False", *kinds("max pool"))
_AVERAGE = "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True"
_takes(_AVERAGE, "avg_pool1d")
_takes(f"{_AVERAGE} divisor_override=None", "avg_pool2d", "avg_pool3d")
_takes("input indices kernel_size stride=None padding=0 output_size=None", *kinds("unpool"))
_takes(
    "input size=None scale_factor=None mode='nearest' align_corners=None recompute_scale_factor=None antialias=False",
    "interpolate",
)
_takes("input p=0.5 training=True inplace=False", "dropout", "dropout1d", "dropout2d", "dropout3d")
_takes("input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False", "embedding")
_takes(
    "input target weight=None size_average=None ignore_index=-100 reduce=None reduction='mean' label_smoothing=0.0",
    "cross_entropy",
)
_takes("query key value attn_mask=None dropout_p=0.0 is_causal=False", "scaled_dot_product_attention")
