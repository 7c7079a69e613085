"""The untiled tail: what follows the boundary, as a network of its own, under policies for its saved tensors.

The tail of a recording is made of the user's own modules and functions, so it can be recorded again as a network whose
inputs are the boundary maps. Then everything that `outcore.within` does to a model can be done to it: its saved tensors
are kept, recomputed, offloaded or encoded so that its peak stays within what the tiles and the maps leave of the
budget. Names of modules are those of the model; functions between them are numbered anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from outcore.cost.costs import Costs
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.rough import by_bytes, scaled, without_gaps
from outcore.errors import CaptureError, PlanError
from outcore.graph import capture
from outcore.graph.record.recording import Ref, Tape, fill
from outcore.graph.structure import device_of, leaves
from outcore.memory.offload.bandwidth import memory_rate
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.settings import Settings
from outcore.planner.memory.plan import MemoryPlan
from outcore.planner.memory.script import link_of
from outcore.program import Links
from outcore.program.policies import parse_policies, policies_to_json
from outcore.program.script import Script
from outcore.stream.plan.prepared import PreparedStream

_SEARCH_S = 1.0
"""Seconds of search for policies at one boundary; several are tried."""


class UntiledTail(nn.Module):
    """The untiled end of a streamed model, a module whose inputs are the values it needs from before."""

    prepared: PreparedStream
    inputs: tuple[str, ...]
    """Names of the values it takes."""
    managed_forward: ManagedForward | None

    def __init__(self, prepared: PreparedStream) -> None:
        super().__init__()
        model = prepared.network.model
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["prepared"] = prepared
        self.__dict__["managed_forward"] = None
        recording = prepared.network.recording
        needed = {r.name for s in prepared.tail for _, r in leaves((s.args, s.kwargs), Ref) if r.kind == "value"}
        needed |= {r.name for _, r in leaves(recording.result, Ref) if r.kind == "value"}
        self.__dict__["inputs"] = tuple(
            name for name in (*prepared.streaming.boundary, *prepared.graph.inputs) if name in needed
        )

    @property
    def training(self) -> bool:
        """The model's own flag."""
        return "prepared" not in self.__dict__ or self.__dict__["prepared"].network.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        pass  # the model's own

    def forward(self, *values: torch.Tensor) -> Any:
        """What the model returns."""
        prepared, recording = self.prepared, self.prepared.network.recording
        tape = Tape(prepared.network.model, recording.constants, dict(zip(self.inputs, values, strict=True)))
        del values
        tape.run(prepared.tail, recording.ambient)
        return fill(recording.result, tape.get)

    def plan(self, budget_bytes: int | None, costs: Costs | None, policy: Mapping[str, str] | None = None) -> None:
        """Find policies that keep it within a budget, or take those that are given.

        Args:
            budget_bytes: for its own weights, their gradients, its inputs and all that it holds; where no policies
                meet it, it stays as it is.
            costs: of the model's calls; without them, times are guessed from bytes.
            policy: by the names of its own values.
        """
        network = self.prepared.network
        with network.recording.ambient.entered():
            stand_ins = tuple(
                torch.empty(network.shapes[name], dtype=network.dtypes[name], device="meta").requires_grad_(
                    network.dtypes[name].is_floating_point and name in self.prepared.streaming.boundary
                )
                for name in self.inputs
            )
            try:
                graph = capture(self, stand_ins)
            except CaptureError:
                if policy is not None:
                    raise
                return  # it begins by writing into what it is given, which only real inputs allow: it stays as it is
            counted = account(graph)
            timed = by_bytes(counted, memory_rate(device_of(network.model)))
            if costs is not None and any(call in costs.calls for call in graph.calls):
                timed = without_gaps(scaled(counted, costs))
            for most in (budget_bytes, None):
                chosen = None if policy is None else parse_policies(policy)
                settings = Settings(most, OptimizerCost.of(0.0), policy=chosen, search_s=_SEARCH_S)
                managed_forward = ManagedForward(self, settings, timed)
                try:
                    managed_forward.admit(managed_forward.key(stand_ins, {}), stand_ins, {}, graph=graph)
                except PlanError:
                    continue
                self.__dict__.update(managed_forward=managed_forward, forward=managed_forward)
                return

    @property
    def policy(self) -> dict[str, str]:
        """What is not kept as autograd would, by its own names, as a document has it."""
        return policies_to_json(self._plan.policy) if self._plan is not None else {}

    @property
    def planned(self) -> bool:
        """Whether it runs by a plan of its own."""
        return self._plan is not None

    @property
    def slowdown(self) -> float:
        """Predicted time over that of plain training."""
        return self._plan.slowdown if self._plan is not None else 1.0

    @property
    def peak_bytes(self) -> int:
        """Predicted peak above its weights and its inputs."""
        assert self._plan is not None
        return max(0, self._plan.peak_bytes - self.start_bytes)

    @property
    def start_bytes(self) -> int:
        """Bytes of its weights and its inputs."""
        if self._plan is None:
            return 0
        at_start = self._plan.keeping.plain.moments[0].bytes
        return at_start.weights + at_start.inputs

    @property
    def plain_s(self) -> float:
        """Seconds of the tail without policies."""
        return self._plan.keeping.plain_s if self._plan is not None else 0.0

    @property
    def scripts(self) -> tuple[Script, Script] | None:
        """Its own forward and backward under its policies; None where it has none."""
        return self._plan.script if self._plan is not None else None

    @property
    def links(self) -> Links | None:
        """The link below the device that its policies copy over."""
        return link_of(self._plan.keeping.tier) if self._plan is not None else None

    @property
    def _plan(self) -> MemoryPlan | None:
        managed_forward = self.managed_forward
        return managed_forward.plan if managed_forward is not None and any(managed_forward.admitted.values()) else None
