"""The plan of an engine that was given none on several ranks.

What a rank is given in a step is the batch of its replica, so the network is recorded with that batch and every
candidate's replicas train on one each: a copy of the network on every rank where it fits, stages or a grid that shares
the image where it does not.
The first rank plans, the others take its plan.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from outcore.errors import EngineError
from outcore.graph import capture
from outcore.job import Job
from outcore.machine import known
from outcore.program.plan.document import Plan
from outcore.run.engine.batch import arguments
from outcore.run.ranks.world import World
from outcore.spatial.choose import plan as make_plan


def own_plan(world: World, source: Job | nn.Module, example: Any) -> Plan:
    """A plan for all ranks, made by the first; collective.

    Args:
        world: the ranks.
        source: what is trained.
        example: inputs of one batch, needed if a module is given.
    """
    made = _plan(world.size, source, example).to_json() if world.rank == 0 else None
    return Plan.from_json(world.share(made)[0])


def _plan(ranks: int, source: Job | nn.Module, example: Any) -> Plan:
    if example is None and not isinstance(source, Job):
        raise EngineError(
            f"{ranks} ranks cannot share a model of which nobody knows what it takes; pass example=inputs (one batch), "
            "or a Job instead of the model"
        )
    if isinstance(source, Job) and example is None:
        graph = source.capture()
    else:
        args, kwargs = arguments(example)
        graph = capture(source.build("meta").train() if isinstance(source, Job) else source, args, kwargs)
    machine = known()
    device = machine.devices[0]
    # Processes on one host share its memory.
    memory = device.memory_bytes // ranks if device.kind == "cpu" else device.memory_bytes
    return make_plan(graph, devices=ranks, memory=memory, machine=machine, shared=False)
