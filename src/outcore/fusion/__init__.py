"""Many small trainings as one (HFTA, arXiv 2102.02344), on unmodified models."""

from outcore.fusion.array import FusedArray as FusedArray
from outcore.fusion.fuse import fuse as fuse
from outcore.fusion.member import Member as Member
from outcore.fusion.member_factory import Objective as Objective
from outcore.fusion.memory_forecast import Forecast as Forecast
from outcore.fusion.memory_forecast import forecast as forecast
from outcore.fusion.optimizer.loss_scale import MemberLossScale as MemberLossScale
from outcore.fusion.program.autotune import AutotuneResult as AutotuneResult
from outcore.fusion.program.autotune import choose as choose
from outcore.fusion.runner import RunMode as RunMode
