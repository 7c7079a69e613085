"""Executes policies for what backward needs: kept, recomputed, offloaded, encoded."""

from outcore.memory.replay.compile_policies import CompiledRecording as CompiledRecording
from outcore.memory.replay.compile_policies import prepare as prepare
from outcore.memory.replay.replay_forward import ReplayPass as ReplayPass
from outcore.memory.saved_tensors.managed_forward import ManagedForward as ManagedForward
