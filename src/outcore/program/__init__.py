"""Programs: a training step as instructions per rank, checked, simulated and drawn."""

from outcore.program.checker.checks import check as check
from outcore.program.compile import assemble as assemble
from outcore.program.compile import compile_program as compile_program
from outcore.program.drawing.chart import chart as chart
from outcore.program.drawing.gantt import rich_gantt as rich_gantt
from outcore.program.drawing.trace import load_trace as load_trace
from outcore.program.drawing.trace import save_trace as save_trace
from outcore.program.drawing.trace import trace as trace
from outcore.program.instructions import Backward as Backward
from outcore.program.instructions import Forward as Forward
from outcore.program.instructions import Instruction as Instruction
from outcore.program.instructions import OptimizerStep as OptimizerStep
from outcore.program.instructions import Receive as Receive
from outcore.program.instructions import Reduce as Reduce
from outcore.program.instructions import Send as Send
from outcore.program.program import Program as Program
from outcore.program.schedules import SCHEDULES as SCHEDULES
from outcore.program.simulator.links import Links as Links
from outcore.program.simulator.simulate import simulate as simulate
from outcore.program.stages import Edge as Edge
from outcore.program.stages import Stage as Stage
from outcore.program.stages import Stages as Stages
from outcore.program.stages import Tie as Tie
from outcore.program.timeline import Event as Event
from outcore.program.timeline import Timeline as Timeline
