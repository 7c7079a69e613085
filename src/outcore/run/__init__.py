"""The runtime: executes plans on one rank or many."""

from outcore.run.engine import Engine as Engine
from outcore.run.launch import launch as launch
from outcore.run.loader import Loader as Loader
from outcore.run.measured import Comparison as Comparison
from outcore.run.part import Execute as Execute
from outcore.run.part import Part as Part
from outcore.run.restore import read_weights as read_weights
from outcore.run.update import LossScale as LossScale
