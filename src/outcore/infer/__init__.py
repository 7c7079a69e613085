"""Trained networks on slides: maps and classes within a memory budget, for one slide or for many."""

from outcore.infer.network import InferNetwork as InferNetwork
from outcore.infer.network import load_network as load_network
from outcore.infer.one_slide import MapOutputs as MapOutputs
from outcore.infer.results import ResultsFolder as ResultsFolder
from outcore.infer.runner import SlideRunner as SlideRunner
from outcore.infer.slides import find_slides as find_slides
