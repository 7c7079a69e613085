"""Which operations draw random numbers."""

from __future__ import annotations

from outcore.ops.registry import Facet, kinds

__all__ = ["DRAWS", "RANDOM"]

DRAWS: Facet[bool] = Facet("random", "draws random numbers")
DRAWS.add(True, *kinds("random", "dropout", "alpha dropout", "random activation", "random pool"))
RANDOM = DRAWS.where()
"""Names of operations that draw random numbers."""
