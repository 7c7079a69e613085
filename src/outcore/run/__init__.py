"""The runtime: executes plans on one rank or many."""

from outcore.run.engine import Engine as Engine
from outcore.run.update import LossScale as LossScale
from outcore.run.world import World as World
