"""Programs: a training step as instructions per rank, checked, simulated and drawn."""

from outcore.program.checks import check as check
from outcore.program.compile import assemble as assemble
from outcore.program.compile import compile_program as compile_program
from outcore.program.instructions import Backward as Backward
from outcore.program.instructions import CopyIn as CopyIn
from outcore.program.instructions import CopyOut as CopyOut
from outcore.program.instructions import Forward as Forward
from outcore.program.instructions import Instruction as Instruction
from outcore.program.instructions import OptimizerStep as OptimizerStep
from outcore.program.instructions import Receive as Receive
from outcore.program.instructions import Reduce as Reduce
from outcore.program.instructions import Send as Send
from outcore.program.links import Links as Links
from outcore.program.program import Program as Program
from outcore.program.schedules import SCHEDULES as SCHEDULES
from outcore.program.simulate import simulate as simulate
from outcore.program.stages import Edge as Edge
from outcore.program.stages import Stage as Stage
from outcore.program.stages import Stages as Stages
from outcore.program.timeline import Event as Event
from outcore.program.timeline import Timeline as Timeline
