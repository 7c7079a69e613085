"""Planning: from a graph and its weights to stages, a schedule and a plan."""

from outcore.planner.partition import Balance as Balance
from outcore.planner.partition import Partition as Partition
from outcore.planner.partition import split as split
from outcore.planner.partition import split_by_hand as split_by_hand
from outcore.planner.pipeline import SCHEDULES as SCHEDULES
from outcore.planner.pipeline import Pipeline as Pipeline
from outcore.planner.pipeline import Route as Route
from outcore.planner.search import plan as plan
from outcore.planner.shapes import weights_from_shapes as weights_from_shapes
from outcore.planner.units import Granularity as Granularity
from outcore.planner.vertical import Fold as Fold
from outcore.planner.vertical import plan_vertically as plan_vertically
from outcore.planner.vertical import split_vertically as split_vertically
from outcore.planner.weights import Weight as Weight
from outcore.planner.weights import Weights as Weights
