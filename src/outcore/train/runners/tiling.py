"""A network in tiles: planned once for a run, kept in its folder, and loaded from there when the run continues.

Planning for a large slide takes a while and depends on what is known of the device; a run that continues must do
bitwise what it would have done, so it uses the same tiles. The same document may be given by hand (``plan.file``).

Much of a slide is glass, and tiles of one colour are computed once. How many there are is estimated on a coarse level
of the first slide, at each tile's own region, so that the predicted time is that of the tissue.

On a GPU images are channels last. With pixels last an H200 took 9.9 GiB at once in the backward of one tile: judging by
the sizes, cuDNN's workspace for a convolution of 16 channels, which it converts; no prediction knows it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.estimate import estimate
from outcore.data import Batch, Source
from outcore.data.slide import SlideLevel
from outcore.graph import Graph, capture
from outcore.job import Job
from outcore.machine import known
from outcore.machine.units import format_bytes
from outcore.program.plan.document import Plan, PredictedStep
from outcore.stream import stream
from outcore.stream.execute.tile_dedup import colour
from outcore.stream.one_device import OneDeviceStep, fit_one_device
from outcore.stream.plan.plan import StreamPlan, how_of
from outcore.stream.plan.prepared import bound, divided
from outcore.stream.plan.step_document import StreamedStep
from outcore.stream.streamed import Streamed
from outcore.train.examples.feed import tensors_of
from outcore.train.settings.config import Config, computing
from outcore.train.settings.schedules import make_optimizer
from outcore.train.start import RunForecast, device_here, duration

__all__ = ["apply_tiles", "arranged", "choose_step", "computed_share", "plan_stream", "readers"]

_FOUND_S = 1.5e-4
"""Host time to find that a tile is glass and was computed before: 0.08 s for 576 of them."""
_LOOKED_THROUGH = 2**23
"""The most pixels of a level that is searched for glass."""


def plan_stream(
    model: nn.Module,
    job: Job,
    config: Config,
    expected: RunForecast,
    inputs: Any,
    budget: int,
    beside: int | None = None,
    found: StreamedStep | None = None,
) -> Plan:
    """Boundary and tiles for a budget, as a document: the optimizer's state and the loss are counted, glass is not.

    Args:
        model: what is trained.
        job: where it comes from.
        config: the settings.
        expected: what was predicted.
        inputs: what a step is given.
        budget: the most it may hold.
        beside: what the loss holds, with its targets.
        found: the tiles, where they are known already.

    Raises:
        PlanError: the budget is too small; names the smallest that works.
        StreamError: nothing can be streamed.
    """
    if found is None:
        step = choose_step(model, job, config, expected, budget, beside, inputs, tiles_only=True).plan
        assert isinstance(step, StreamedStep)
        found = step
    graph = expected.graph if expected.graph is not None else capture(model, list(expected.shapes))
    plan, peak = found.plan, found.peak_bytes
    share = computed_share(inputs, graph, plan)
    step_s = found.time_s
    if share < 1:
        step_s += plan.time_s * (share - 1) + plan.passes * plan.tiles * _FOUND_S
    said = f"{plan.words}, predicted peak {format_bytes(peak)}"
    if share < 1:
        said += f", about {100 * share:.0f} % of it tissue"
    return Plan(
        graph.fingerprint,
        (("",),),
        exactness="reassociated",
        stream=plan.document(),
        memory_bytes=budget,
        predicted=PredictedStep(step_s, (peak,), 0.0, "estimate"),
        why=(f"{said}, {duration(step_s)} a step",),
    )


def choose_step(
    model: nn.Module,
    job: Job,
    config: Config,
    expected: RunForecast,
    budget: int,
    beside: int | None = None,
    inputs: Any = None,
    *,
    tiles_only: bool = False,
) -> OneDeviceStep:
    """How a step is made to fit, by the ladder that `outcore plan` goes up, too.

    Args:
        model: what is trained.
        job: where it comes from.
        config: the settings.
        expected: what was predicted.
        budget: the most a step may hold.
        beside: what the loss holds, with its targets.
        inputs: what a step is given; tensors among it lie on the device.
        tiles_only: leave out what needs the whole image on the device.
    """
    name, device = device_here(config.train.device)
    optimizer = OptimizerCost.of(make_optimizer(config.optimizer, job), device.kind)
    with computing(config.train.precision, "cpu" if expected.graph is not None else torch.device(name).type):
        graph = expected.graph if expected.graph is not None else capture(model, list(expected.shapes))
        return fit_one_device(
            graph,
            estimate(graph, device),
            replace(known(), devices=(device,)),
            budget,
            optimizer=optimizer,
            loss_bytes=beside,
            plain_s=expected.step_s,
            plain_bytes=expected.peak_bytes if expected.loss_bytes is not None else None,
            image_bytes=sum(t.numel() * t.element_size() for t in tensors_of(inputs)),
            statistics=config.plan.statistics,
            tiles_only=tiles_only,
        )


def apply_tiles(model: nn.Module, plan: Plan) -> Streamed:
    """The model, streamed as a plan says."""
    assert plan.stream is not None
    return stream(arranged(model), **how_of(plan.stream), workers=readers(model))


def readers(model: nn.Module) -> int:
    """Threads that prefetch the tiles of a slide: a GPU leaves the host's cores free for it."""
    return 4 if any(p.is_cuda for p in model.parameters()) else 2


def arranged(model: nn.Module) -> nn.Module:
    """The model itself, its weights in the memory format in which its device convolves images."""
    on_gpu = any(p.is_cuda for p in model.parameters())
    return model.to(memory_format=torch.channels_last) if on_gpu else model  # type: ignore[call-overload]


def computed_share(inputs: Any, graph: Graph, plan: StreamPlan) -> float:
    """The share of a slide's tiles that will be computed, by a coarse level of it; 1 where there is none.

    Args:
        inputs: what a step is given.
        graph: of the network, at the slide's size.
        plan: its tiles.
    """
    given = inputs[0] if isinstance(inputs, (tuple, list)) and inputs else inputs
    if not isinstance(given, Batch) or len(given.sources) != 1 or not isinstance(given.sources[0], SlideLevel):
        return 1.0
    here = given.sources[0]
    if len(plan.tile) != 2 or (coarse := _coarse(here)) is None:
        return 1.0
    pixels = coarse.read([(0, n) for n in coarse.shape])
    by = [large / small for large, small in zip(here.shape[1:], coarse.shape[1:], strict=True)]
    network = bound(graph, folded=True)
    how = {"boundary": plan.boundary, "statistics": plan.statistics, "keep": plan.keep}
    kinds = divided(network, tile=plan.tile, **how).kinds[-1]  # type: ignore[arg-type]
    images = [name for name in kinds.stage.sources if name in network.inputs]
    if len(images) != 1:
        return 1.0
    drawn, glass, tiles = 0, set(), 0
    for tile in kinds:
        sides = zip(tile.regions[images[0]][-2:], by, strict=True)
        rows, columns = (slice(math.floor(a / b), math.ceil(z / b)) for (a, z), b in sides)
        tiles += 1
        if (found := colour(pixels[None, :, rows, columns])) is None:
            drawn += 1
        else:
            glass.add((found, tile.kind))
    return (drawn + len(glass)) / tiles


def _coarse(here: SlideLevel) -> Source | None:
    """The finest level that is quick to read, coarser than the one that is trained on."""
    slide = here.slide
    levels = range(here.level + 1, len(slide.levels))
    small = [level for level in levels if math.prod(slide.levels[level].size) <= _LOOKED_THROUGH]
    return slide.at(level=small[0]) if small else None
