"""Many small trainings as one (HFTA, arXiv 2102.02344), on unmodified models."""

from outcore.fusion.array import FusedArray as FusedArray
from outcore.fusion.choice import Choice as Choice
from outcore.fusion.choice import choose as choose
from outcore.fusion.forecast import Forecast as Forecast
from outcore.fusion.forecast import forecast as forecast
from outcore.fusion.fuse import fuse as fuse
from outcore.fusion.kind import Objective as Objective
from outcore.fusion.member import Member as Member
from outcore.fusion.runner import Way as Way
from outcore.fusion.scaling import LossScale as LossScale
