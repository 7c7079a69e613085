"""Planning: from a graph and its weights to stages, a schedule and a plan."""

from outcore.planner.partition.partition import Partition as Partition
from outcore.planner.partition.partition import split as split
from outcore.planner.partition.partition import split_by_hand as split_by_hand
from outcore.planner.partition.strategies import Balance as Balance
from outcore.planner.partition.units import Granularity as Granularity
from outcore.planner.pipeline.call_weights import CallWeight as CallWeight
from outcore.planner.pipeline.call_weights import CallWeights as CallWeights
from outcore.planner.pipeline.fold_unet import Fold as Fold
from outcore.planner.pipeline.fold_unet import plan_vertically as plan_vertically
from outcore.planner.pipeline.fold_unet import split_vertically as split_vertically
from outcore.planner.pipeline.schedule_model import SCHEDULES as SCHEDULES
from outcore.planner.pipeline.schedule_model import Pipeline as Pipeline
from outcore.planner.pipeline.schedule_model import RankLink as RankLink
from outcore.planner.pipeline.search import plan as plan
