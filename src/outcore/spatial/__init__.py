"""Spatial parallelism: one image over a grid of ranks, with halo exchange."""

from outcore.spatial.part_costs import measure_part as measure_part
from outcore.spatial.parts import PartGrid as PartGrid
from outcore.spatial.plan import plan_grid as plan_grid
from outcore.spatial.virtual import VirtualRanks as VirtualRanks
