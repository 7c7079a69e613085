"""Many small trainings as one (HFTA, arXiv 2102.02344), on unmodified models."""

from outcore.fusion.array import FusedArray as FusedArray
from outcore.fusion.array import Objective as Objective
from outcore.fusion.fuse import fuse as fuse
from outcore.fusion.member import Member as Member
from outcore.fusion.scaling import LossScale as LossScale
