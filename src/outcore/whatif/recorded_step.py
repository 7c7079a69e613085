"""A training step as tasks, and the few changes from which every "what if" is made.

Daydream (Zhu et al., ATC 2020) showed that the gain of an optimization can be told before it is written: record a step
as tasks with their dependencies, change the tasks as the optimization would, and simulate. What a change is made of is
five primitives, and they are all there is here:

    select       tasks by block, kind, phase or resource
    scale        their time
    remove       them; what waited for a removed task waits for what that waited for
    insert       a task after some and before others
    reschedule   the order in which a resource takes the tasks that are ready

A task runs on one resource. The *host* launches operations one after the other and the *device* runs them in that
order, each when it is launched; a *link* moves gradients or weights between ranks, a *copy* engine values to host
memory. So a network whose host sets the pace gains nothing from faster kernels, as in reality. On a CPU there is no
second clock: launching and running are tasks of one resource.

A step is a value: every primitive returns a new one, and the simulator (`outcore.whatif.clocks`) reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from outcore.errors import WhatIfError, suggest
from outcore.graph.parts import ancestors

if TYPE_CHECKING:
    from outcore.whatif.clocks import SimulatedStep

__all__ = ["HOST", "PHASES", "Phase", "RecordedStep", "Task"]

HOST, DEVICE, LINK, COPY = "host", "device", "link", "copy"
Phase = Literal["forward", "backward", "optimizer", "communication"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "communication")


@dataclass(frozen=True, slots=True)
class Task:
    """One thing that a resource does."""

    name: str
    resource: str
    time_s: float
    after: tuple[str, ...] = ()
    """Tasks that must have ended before it begins."""
    block: str = ""
    kind: str = ""
    """Class of the layer or name of the function: "Conv2d", "relu"; "launch" for the host's part of it."""
    phase: Phase = "forward"
    bytes: int = 0
    """What it moves, or 0 where that is not known."""
    flops: int = 0
    low_s: float = 0.0
    high_s: float = 0.0
    """Between these its time lies in four cases of five; both 0 where that is not known."""

    def scaled(self, factor: float) -> Task:
        """The task with another time."""
        low_s, high_s = self.low_s * factor, self.high_s * factor
        return replace(self, time_s=self.time_s * factor, low_s=low_s, high_s=high_s)


@dataclass(frozen=True)
class RecordedStep:
    """The tasks of a training step, in the order in which each resource takes them.

    >>> a, b = Task("launch a", "host", 2.0), Task("launch b", "host", 2.0)
    >>> conv = Task("a", "device", 1.0, after=("launch a",), kind="Conv2d")
    >>> step = RecordedStep.of([a, conv, b, Task("b", "device", 1.0, after=("launch b",), kind="ReLU")])
    >>> step.simulate().step_s, step.scale(step.select(kind="Conv2d"), 0.5).simulate().step_s
    (5.0, 5.0)
    """

    tasks: Mapping[str, Task]
    """By name; a resource runs its tasks in this order, unless it was rescheduled."""
    name: str = ""
    batch: int = 1
    priority: Mapping[str, Callable[[Task], float]] = field(default_factory=dict)
    """Resources that take the ready task of the smallest number, instead of the next in order."""
    notes: tuple[str, ...] = ()
    peak_bytes: int | None = None
    """What the step holds, where that is not what the recorded one does."""

    @classmethod
    def of(cls, tasks: Iterable[Task], *, name: str = "", batch: int = 1) -> RecordedStep:
        """A step of tasks in their order.

        Raises:
            WhatIfError: two tasks have one name, a time is negative, or one waits for a task that is not there.
        """
        found: dict[str, Task] = {}
        for task in tasks:
            if task.name in found:
                raise WhatIfError(f"two tasks are called {task.name!r}; names must differ")
            if not task.time_s >= 0:
                raise WhatIfError(f"task {task.name!r} takes {task.time_s} s; it must be at least 0")
            found[task.name] = task
        for task in found.values():
            for needed in task.after:
                if needed not in found:
                    raise WhatIfError(f"task {task.name!r} waits for {needed!r}, which is not a task of the step")
        return cls(found, name, batch)

    # The five primitives.

    def select(
        self,
        *,
        block: str | None = None,
        kind: str | None = None,
        phase: Phase | None = None,
        resource: str | None = None,
    ) -> tuple[str, ...]:
        """The names of tasks: those of a block with all inside it, of a kind, of a phase, on a resource.

        A kind matches without case, as a part of the name: "conv" selects Conv1d, Conv2d and Conv3d.

        Raises:
            WhatIfError: there is no such block or kind; names those that are.
        """
        if block is not None and block not in self.blocks:
            raise WhatIfError(f"no block {block!r} in {self.name or 'the step'}; {suggest(block, self.blocks)}")
        if kind is not None and not any(kind.lower() in known.lower() for known in self.kinds):
            raise WhatIfError(f"no kind {kind!r} in {self.name or 'the step'}; {suggest(kind, self.kinds)}")
        return tuple(
            task.name
            for task in self.tasks.values()
            if (block is None or block in (task.block, *ancestors(task.block)))
            and (kind is None or kind.lower() in task.kind.lower())
            and (phase is None or phase == task.phase)
            and (resource is None or resource == task.resource)
        )

    def scale(self, names: Iterable[str], factor: float) -> RecordedStep:
        """The step in which some tasks take `factor` times as long."""
        if not factor >= 0:
            raise WhatIfError(f"a time cannot be multiplied by {factor}; give a factor of at least 0, such as 0.5")
        chosen = self._known(names)
        return self._with({n: t.scaled(factor) if n in chosen else t for n, t in self.tasks.items()})

    def remove(self, names: Iterable[str]) -> RecordedStep:
        """The step without some tasks; what waited for one of them waits for what that waited for."""
        gone = self._known(names)
        ends: dict[str, tuple[str, ...]] = {}

        def instead(name: str) -> tuple[str, ...]:
            """The tasks that are left in the place of one; found without recursion, as chains are long."""
            open_ = [name]
            while open_:
                at = open_[-1]
                missing = [n for n in self.tasks[at].after if n in gone and n not in ends]
                if missing:
                    open_ += missing
                    continue
                ends[at] = _joined(ends[n] if n in gone else (n,) for n in self.tasks[at].after)
                open_.pop()
            return ends[name]

        left = {
            n: replace(t, after=_joined(instead(a) if a in gone else (a,) for a in t.after))
            for n, t in self.tasks.items()
            if n not in gone
        }
        return self._with(left)

    def insert(self, task: Task, *, before: Sequence[str] = (), place: str | None = None) -> RecordedStep:
        """The step with one more task: after what it waits for, and before tasks that will wait for it.

        Args:
            task: the new task; its `after` says what it waits for.
            before: tasks that wait for it.
            place: the task of the same resource that it comes before in the resource's order; the last if not given.
        """
        if task.name in self.tasks:
            raise WhatIfError(f"the step has a task {task.name!r} already; give the new one another name")
        later, _ = self._known(before), self._known(task.after)
        tasks: dict[str, Task] = {}
        if place is not None:
            self._known([place])
        for name, old in self.tasks.items():
            if name == place:
                tasks[task.name] = task
            tasks[name] = replace(old, after=(*old.after, task.name)) if name in later else old
        tasks.setdefault(task.name, task)
        return self._with(tasks)

    def reschedule(self, resource: str, priority: Callable[[Task], float]) -> RecordedStep:
        """The step in which a resource takes the ready task for which `priority` is smallest.

        >>> tasks = [Task("late", "link", 1.0), Task("early", "link", 1.0), Task("use", "device", 1.0, ("early",))]
        >>> step = RecordedStep.of(tasks)
        >>> step.simulate().step_s, step.reschedule("link", lambda task: task.name == "late").simulate().step_s
        (3.0, 2.0)
        """
        if resource not in self.resources:
            raise WhatIfError(f"no resource {resource!r}; {suggest(resource, self.resources)}")
        return replace(self, priority={**self.priority, resource: priority})

    def simulate(self) -> SimulatedStep:
        """How long the step takes, and what each resource did."""
        from outcore.whatif.clocks import simulate_tasks

        return simulate_tasks(self)

    @property
    def resources(self) -> tuple[str, ...]:
        """The resources that have tasks."""
        return tuple(dict.fromkeys(task.resource for task in self.tasks.values()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of operations, without the host's."""
        return tuple(dict.fromkeys(t.kind for t in self.tasks.values() if t.kind and t.kind != "launch"))

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks that have tasks, and those around them."""
        own = dict.fromkeys(t.block for t in self.tasks.values() if t.block)
        return tuple(dict.fromkeys(path for block in own for path in (*ancestors(block), block) if path))

    def noted(self, note: str) -> RecordedStep:
        """The step with one more sentence about how it was made."""
        return replace(self, notes=(*self.notes, note))

    def _with(self, tasks: dict[str, Task]) -> RecordedStep:
        return replace(self, tasks=tasks)

    def _known(self, names: Iterable[str]) -> frozenset[str]:
        chosen = frozenset(names)
        for name in chosen:
            if name not in self.tasks:
                raise WhatIfError(f"no task {name!r} in the step; {suggest(name, self.tasks)}")
        return chosen


def _joined(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))
