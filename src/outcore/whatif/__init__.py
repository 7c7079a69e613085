"""What would a training step take elsewhere: with another technique, on other GPUs, on more of them.

import outcore

found = outcore.whatif.ask(job, ["amp", "compile", "layer3=free"])        # a table of answers
step = outcore.whatif.record(job)                                         # tasks, to be changed by hand
faster = step.scale(step.select(kind="conv"), 0.5).simulate().step_s
"""

from outcore.whatif.answer import Answer, Answers, ask
from outcore.whatif.clocks import SimulatedStep
from outcore.whatif.recorded_step import RecordedStep, Task
from outcore.whatif.recording import record

__all__ = ["Answer", "Answers", "RecordedStep", "SimulatedStep", "Task", "ask", "record"]
