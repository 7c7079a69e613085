"""What the page shows, as one JSON document that is made piece by piece.

    {"format": 1, "title": …, "about": …, "graph": …, "drawing": …, "costs": …, "sources": …, "memory": …,
     "sizes": …, "plans": …, "pipeline": …, "commands": …}

Pieces come in the order in which they are ready: the network and its costs after a second or two, then predictions for
other sizes, then the frontier of plans. A piece that is sent again replaces the one before it. The exported page holds
the last of each; the live page gets them as they come, so it is of use before the slow ones are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outcore.cost.profile import Profile, profile
from outcore.errors import OutcoreError, PlanError
from outcore.explore.block_costs import CATEGORIES, block_rows, call_rows, kind_rows
from outcore.explore.commands import command_rows
from outcore.explore.line_costs import SourceFile, source_files
from outcore.explore.many_devices import pipeline_json, run_prediction
from outcore.explore.plan_points import PlanTable
from outcore.explore.resized_job import resized_job
from outcore.explore.size_grid import predict_sizes
from outcore.job import Job
from outcore.machine import Machine, known, parse
from outcore.machine.units import parse_bytes
from outcore.report.bundle import bundle as graph_bundle

__all__ = ["ExploreSettings", "Explored", "default_folder", "explore_bundle"]

FORMAT = 1


@dataclass(frozen=True)
class ExploreSettings:
    """What is looked at: a job, where it would run, and how long the page may be computed."""

    job: str
    inputs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    machine: str | None = None
    """By name; this machine if not given."""
    batch: int | None = None
    image: int | None = None
    """Longest side of the images; the job's own if not given."""
    devices: int | None = None
    """To plan for; one if not given."""
    memory: str | None = None
    """A budget to begin with, smaller than what the device has."""
    run: str | None = None
    """Folder of a run that is shown beside the job; where `outcore train` would keep it if not given."""
    measured: bool = False
    """Whether every call is run here, instead of being predicted."""
    seconds: float = 20.0
    """For predictions of other sizes."""
    search_s: float = 0.5
    """For every point of the frontier."""

    def load(self) -> Job:
        """The job, with images of the size that is looked at."""
        job = Job.load(self.job, inputs=self.inputs, arguments=self.arguments)
        return job if self.image is None else resized_job(job, self.image)


class Explored:
    """A job that was looked at: gives the pieces of its page, and answers what is asked of it afterwards."""

    def __init__(self, settings: ExploreSettings) -> None:
        self.settings = settings
        self.where: Machine = parse(settings.machine) if settings.machine else known()
        self.job = settings.load()
        self.shown: Profile = profile(
            self.job, self.where.devices[0], size=settings.batch, measured=settings.measured, time_limit_s=120.0
        )
        self.sources: list[SourceFile] = source_files(self.shown.graph, self.shown.costs)
        self.table: PlanTable | None = None

    def later(self) -> Iterator[tuple[str, Any]]:
        """Name and value of what takes its time, as it is ready; a later piece replaces an earlier of its name."""
        self.table = PlanTable.of(self.job, self.shown, self.where)
        plain = self.table.plain()
        yield "plans", self._plans([plain], complete=False)
        if self.settings.devices and self.settings.devices > 1:
            yield "pipeline", pipeline_json(self.job, self.where, self.settings.devices, self.settings.batch)
        folder = Path(self.settings.run) if self.settings.run else default_folder(self.settings.job)
        if (predicted := run_prediction(self.job, self.where, folder, self.shown.size)) is not None:
            yield "predicted_run", predicted
        device = self.where.devices[0]
        limits = {"seconds": self.settings.seconds, "batch": self.shown.size}
        for grid in predict_sizes(self.job, device, self.shown, **limits):  # type: ignore[arg-type]
            yield "sizes", grid.to_json()
        for found in self.table.frontier(search_s=self.settings.search_s):
            yield "plans", self._plans(found, complete=False)
        yield "plans", self._plans(found, complete=True)

    def first(self) -> dict[str, Any]:
        """What is known at once."""
        shown, settings = self.shown, self.settings
        graph, memory = shown.graph, shown.memory
        job_file = Path(settings.job)
        drawn = graph_bundle(graph, title=job_file.name if job_file.is_file() else settings.job)
        return {
            **drawn,
            "format": FORMAT,
            "about": {
                "job": settings.job,
                "batch": shown.size,
                "image": settings.image,
                "device": shown.device.name,
                "kind": shown.device.kind,
                "capacity_bytes": shown.device.memory_bytes,
                "budget_bytes": parse_bytes(settings.memory) if settings.memory else None,
                "machine": self.where.name,
                "devices": settings.devices or 1,
                "source": shown.step.source,
                "notes": [*graph.notes, *shown.costs.notes],
                "too_large": shown.too_large(),
                "unmeasured": len(shown.costs.unmeasured),
            },
            "costs": {
                "blocks": block_rows(graph, shown.costs, memory),
                "calls": call_rows(graph, shown.costs),
                "kinds": kind_rows(shown.costs),
            },
            "step": {
                **{f"{n}_s": getattr(shown.step, f"{n}_s") for n in ("forward", "backward", "optimizer", "transfer")},
                "wait_s": shown.step.wait_s,
                "step_s": shown.step.step_s,
                "interval_s": list(shown.step.interval_s),
                "flops": shown.flops,
                "busy_share": shown.busy_share,
                "precisions": [asdict(p) for p in shown.precisions],
            },
            "memory": {
                "categories": list(CATEGORIES),
                "at_peak": list(asdict(memory.at_peak).values()),
                "peak_bytes": memory.peak_bytes,
                "phase": memory.peak.phase,
                "call": memory.peak.call,
                "held": [[h.name, h.block, CATEGORIES.index(h.category), h.bytes] for h in memory.composition[:400]],
            },
            "sources": [file.to_json() for file in self.sources],
            "commands": command_rows(settings, trains=job_file.is_file()),
        }

    def by_hand(self, policy: dict[str, str], change: dict[str, str]) -> dict[str, Any]:
        """A point with the policies of some blocks changed."""
        if self.table is None:
            raise PlanError("the plans of this job are not there yet")
        made = self.table.by_hand(policy, change)
        return self.table.point_json(made) | {"document": self.table.document(made).to_json()}

    def _plans(self, found: list[Any], *, complete: bool) -> dict[str, Any]:
        table = self.table
        assert table is not None
        points = [table.point_json(one) | {"document": table.document(one).to_json()} for one in found]
        needed = None
        if complete and min(p["peak_bytes"] for p in points) > table.capacity_bytes:
            needed = self._in_tiles(table)
        floor, at = table.model.floor
        moment = table.model.plain.moments[at]
        return {
            "points": points,
            "complete": complete,
            "floor_bytes": floor,
            "floor_at": f"{moment.phase} of {moment.call}" if moment.call else "the optimizer's step",
            "tiles": needed,
        }

    def _in_tiles(self, table: PlanTable) -> dict[str, Any]:
        """How the step is done in tiles where no policy is enough, in words; or why it cannot be."""
        from outcore.cost.optimizer_cost import OptimizerCost
        from outcore.cost.predicted.estimate import estimate
        from outcore.cost.profile import loss_bytes_of_job
        from outcore.stream.one_device import fit_one_device

        device, size = self.shown.device, self.shown.size
        optimizer = OptimizerCost.of(self.job.update, device.kind)
        try:
            graph = self.job.capture(size)
            costs = estimate(graph, self.where)
            step = fit_one_device(
                graph,
                costs,
                self.where,
                table.capacity_bytes,
                optimizer=optimizer,
                loss_bytes=loss_bytes_of_job(self.job, graph, costs, device, optimizer, size=size),
                plain_s=self.shown.step.step_s,
                plain_bytes=self.shown.memory.peak_bytes,
                tiles_only=True,
            ).plan
            return {"text": step.explain(), "document": step.document().to_json()}
        except (OutcoreError, AssertionError) as error:
            return {"refused": str(error)}


def default_folder(job: str) -> Path:
    """Where `outcore train` keeps the run of a job that is not told otherwise."""
    return Path("runs") / (Path(job).stem if job.endswith(".py") else job.rpartition(":")[2])


def explore_bundle(settings: ExploreSettings) -> dict[str, Any]:
    """All pieces of a job's page, the last of each."""
    from outcore.explore.watched_run import run_piece

    explored = Explored(settings)
    found = explored.first() | dict(explored.later())
    run = run_piece(Path(settings.run)) if settings.run else None
    return found | ({"run": run} if run is not None else {})
