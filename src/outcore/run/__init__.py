"""The runtime: executes plans on one rank or many."""

from outcore.loss_scale import LossScale as LossScale
from outcore.run.checkpoint.restore import read_weights as read_weights
from outcore.run.engine.engine import Engine as Engine
from outcore.run.engine.loader import Loader as Loader
from outcore.run.engine.measured import Comparison as Comparison
from outcore.run.engine.settings import EngineSettings as EngineSettings
from outcore.run.link_probe import measure_link as measure_link
from outcore.run.ranks.launch import launch as launch
from outcore.run.stage.stage_module import Execute as Execute
from outcore.run.stage.stage_module import Part as Part
