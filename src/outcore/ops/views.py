"""Functions that only rearrange: the same elements under another shape, or nothing but bookkeeping.

Two questions are asked of such a function. Does the network compute anything with it? `REARRANGING` says no: versions
of torch and of a model's code differ in how often they reshape, so fingerprints of graphs leave these out. Does it
take time? `WITHOUT_WORK`, which contains them, says no: it moves no data worth counting.
"""

from __future__ import annotations

__all__ = ["REARRANGING", "WITHOUT_WORK"]

REARRANGING = frozenset(
    "T mT view reshape contiguous transpose permute swapaxes squeeze unsqueeze flatten unflatten expand getitem".split()
)
"""Functions whose result has the elements of their input, in another shape or order, or some of them."""

WITHOUT_WORK = REARRANGING | frozenset(
    (
        "data detach view_as expand_as chunk split unbind narrow select movedim Identity Flatten Unflatten to type_as "
        "requires_grad_ size real imag tensor arange zeros ones empty full zeros_like new_zeros"
    ).split()
)
"""Blocks that move no data worth counting (a `contiguous` or `reshape` that does copy is counted as a copy)."""
