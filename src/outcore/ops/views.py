"""Which operations only rearrange, share memory with their input, or do no work.

Three questions are asked of such an operation. Does the network compute anything with it? `REARRANGES` says no:
versions of torch and of a model's code differ in how often they reshape, so fingerprints of graphs leave these out.
Does it take time? `FREE`, which contains them, says no: it moves no data worth counting. May its result be the memory
that it was given? `SHARES_MEMORY` says yes.
"""

from __future__ import annotations

from outcore.ops.registry import Facet, kinds

__all__ = ["FREE", "REARRANGES", "REARRANGING", "SHARES_MEMORY", "SHARING", "WITHOUT_WORK"]

REARRANGES: Facet[bool] = Facet(
    "rearranges", "has the elements of its input, in another shape or order, or some of them"
)
REARRANGES.add(
    True,
    *"T mT view reshape contiguous transpose permute swapaxes squeeze unsqueeze flatten".split(),
    *"unflatten expand getitem".split(),
)

FREE: Facet[bool] = Facet("free", "moves no data worth counting")
FREE.add(
    True,
    *kinds("view", "detaching", "identity"),
    *"contiguous to type_as size tensor arange zeros ones empty full zeros_like new_zeros".split(),
)

SHARES_MEMORY: Facet[bool] = Facet("shares memory", "may return the memory it is given")
SHARES_MEMORY.add(True, *kinds("view", "cast", "detaching"), "contiguous", "unfold", "positive")

REARRANGING = REARRANGES.where()
"""Names of operations whose result has the elements of their input."""
WITHOUT_WORK = FREE.where()
"""Names of operations that move no data worth counting (a `contiguous` or `reshape` that does copy is counted as a
copy)."""
SHARING = SHARES_MEMORY.where()
"""Names of operations that may return the memory they are given."""
