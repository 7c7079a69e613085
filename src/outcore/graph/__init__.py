"""Graphs: what a network consists of, recorded from an unmodified model."""

from outcore.graph.graph import Graph as Graph
from outcore.graph.parts import ROOT as ROOT
from outcore.graph.parts import Block as Block
from outcore.graph.parts import Call as Call
from outcore.graph.parts import Value as Value
from outcore.graph.queries import Cut as Cut
from outcore.graph.queries import Skip as Skip
from outcore.graph.record.capture import capture as capture
from outcore.graph.record.captured_module import CapturedModule as CapturedModule
from outcore.graph.subgraph import Subgraph as Subgraph
from outcore.graph.view import Box as Box
from outcore.graph.view import View as View
