"""Executes policies for what backward needs: kept, made again, moved to a slower tier, encoded."""

from outcore.memory.governor import Governor as Governor
from outcore.memory.holding import Holding as Holding
from outcore.memory.holding import prepare as prepare
from outcore.memory.passage import Pass as Pass
