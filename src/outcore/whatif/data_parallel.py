"""Data parallel and sharded training as tasks of one rank: every rank does the same, so one is enough.

**Data parallel**, as `DistributedDataParallel` does it. Gradients are put into buckets in the order in which backward
makes them, a first one of 1 MiB and then 25 MiB each; a bucket's all-reduce begins when its last gradient is there and
the all-reduce before it is over, while backward goes on; the optimizer waits for the last. What counts is where the
bytes are: VGG-19 has 86 % of its weights in fully connected layers, whose gradients come first in backward, with all of
the convolutions still to hide behind; and so many that they do not hide.

    device  | forward | backward fc | backward conv .................. |      wait      | optimizer |
    link                            | all-reduce of fc (471 MiB) ....................... |

Before forward the first rank's buffers are sent to the others (the statistics of batch norms): little to send, but over
a slow link a message that everybody waits for.

On a CPU the cores that compute also copy and add what is reduced (`ClusterLink.core_s`): that part is a task of the
device, and only the rest is hidden behind backward.

**Sharded**, as FSDP2 does it. Each block's weights are gathered before its forward and again before its backward, and
its gradients scattered after; the next block's gather is on its way while this one computes, but on a CPU each is
waited for. The hooks around every block are work of the host, so a network of many small blocks, whose host sets the
pace, is slower sharded than data parallel. An optimizer's step is of one share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from outcore.graph.parts import ancestors
from outcore.whatif.links import ClusterLink
from outcore.whatif.recorded_step import Phase, RecordedStep, Task
from outcore.whatif.recording import SetupRecording

__all__ = [
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "GradientBucket",
    "buckets_of",
    "buffer_bytes",
    "data_parallel",
    "sharded",
]

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
_UNIT_HOOKS, _PARAMETER_HOOKS = 145, 20
"""What FSDP2's hooks take of the host in a step, for each unit and for each parameter, over the time of one operation:
on one rank of a CPU, with 1 to 8 units of 2 to 8 parameters (torch 2.13)."""


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients that are reduced together."""

    parameters: tuple[str, ...]
    bytes: int
    after: str
    """The task that makes the last of them."""


def gradient_tasks(recording: SetupRecording) -> dict[str, str]:
    """By parameter: the task of backward that completes its gradient, in the order of completion."""
    graph, costs = recording.profile.graph, recording.profile.costs
    found: dict[str, str] = {}
    for name in reversed(list(graph.calls)):
        for gradient in costs.calls[name].gradients:
            if gradient.of in costs.parameters:
                found.pop(gradient.of, None)  # a shared parameter is complete with its last call
                found[gradient.of] = f"{name} backward"
    return found


def buckets_of(
    made_by: Mapping[str, str],
    sizes: Mapping[str, int],
    *,
    first_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[GradientBucket]:
    """Gradients in their order, closed to a bucket whenever it has reached its size.

    >>> made = {"c": "c backward", "b": "b backward", "a": "a backward"}
    >>> [b.parameters for b in buckets_of(made, {"a": 10, "b": 30, "c": 5}, first_bytes=4, bucket_bytes=25)]
    [('c',), ('b',), ('a',)]
    """
    found: list[GradientBucket] = []
    names: list[str] = []
    held, limit = 0, first_bytes
    for name, task in made_by.items():
        names.append(name)
        held += sizes[name]
        if held >= limit:
            found.append(GradientBucket(tuple(names), held, task))
            names, held, limit = [], 0, bucket_bytes
    if names:
        found.append(GradientBucket(tuple(names), held, list(made_by.values())[-1]))
    return found


def data_parallel(
    step: RecordedStep, recording: SetupRecording, ranks: int, link: ClusterLink, *, bucket_bytes: int = BUCKET_BYTES
) -> RecordedStep:
    """A rank's step with the all-reduces of its gradients."""
    if ranks < 2:
        return step
    sizes = recording.profile.costs.parameters
    made_by = {p: t for p, t in gradient_tasks(recording).items() if t in step.tasks}
    found = buckets_of(made_by, sizes, bucket_bytes=bucket_bytes, first_bytes=min(FIRST_BUCKET_BYTES, bucket_bytes))
    memory_s = 2 / recording.device.bandwidth_bytes_per_s  # a gradient is copied into its bucket, and back out of it
    inserted: dict[str, list[Task]] = {}
    last: list[str] = []
    for number, bucket in enumerate(found):
        copy_s = bucket.bytes * memory_s
        copied = Task(f"fill bucket {number}", "device", copy_s, (bucket.after,), kind="bucket", phase="backward")
        reduced = Task(
            f"all-reduce {number}", "link", link.all_reduce_s(bucket.bytes, ranks), (copied.name,),
            kind="all-reduce", phase="communication", bytes=bucket.bytes,
        )  # fmt: skip
        new = [copied, reduced]
        core_s = link.core_s(bucket.bytes, ranks, recording.device)
        if core_s:
            name = f"copy and add {number}"
            new.append(Task(name, "device", core_s, (copied.name,), kind="all-reduce", phase="communication"))
        inserted.setdefault(bucket.after, []).extend(new)
        last.append(reduced.name)
    total_s = sum(b.bytes for b in found) * memory_s
    emptied = Task("empty buckets", "device", total_s, tuple(last), kind="bucket", phase="communication")
    return _woven(_after_buffers(step, recording, ranks, link), inserted, emptied)


def buffer_bytes(recording: SetupRecording) -> int:
    """Of the model's buffers, which data parallel ranks get from the first one in every step."""
    graph = recording.profile.graph
    return sum(buffer.nbytes for buffer in graph.module.model.buffers()) if graph.executable is not None else 0


def _after_buffers(step: RecordedStep, recording: SetupRecording, ranks: int, link: ClusterLink) -> RecordedStep:
    """The step, begun when the buffers have come. Those of all types are under way at once: one message, as long as a
    gather of as many bytes."""
    nbytes = buffer_bytes(recording)
    first = next((t for t in step.tasks.values() if t.phase == "forward" and t.resource == "device"), None)
    if not nbytes or first is None:
        return step
    sent = Task(
        "broadcast buffers", "link", link.gather_s(nbytes, ranks),
        kind="broadcast", phase="communication", bytes=nbytes,
    )  # fmt: skip
    waiting = replace(first, after=(*first.after, sent.name))
    return replace(step, tasks={sent.name: sent, **step.tasks, first.name: waiting})


def _woven(step: RecordedStep, inserted: Mapping[str, list[Task]], before_optimizer: Task) -> RecordedStep:
    """The step with tasks behind those that they wait for, and one before the optimizer."""
    tasks: dict[str, Task] = {}
    waiting = True
    for name, task in step.tasks.items():
        if waiting and task.phase == "optimizer" and task.resource == "device" and task.kind != "launch":
            tasks[before_optimizer.name] = before_optimizer
            waiting = False
        tasks[name] = task
        for new in inserted.get(name, ()):
            tasks[new.name] = new
    if waiting:
        tasks[before_optimizer.name] = before_optimizer
    return replace(step, tasks=tasks)


@dataclass(frozen=True, slots=True)
class GatheredUnit:
    """A block whose weights are gathered and scattered together."""

    block: str
    bytes: int
    parameters: int = 1


def units_of(recording: SetupRecording) -> list[GatheredUnit]:
    """The blocks that are sharded each for itself: children of the model, and of a child that is a long sequence."""
    graph, costs = recording.profile.graph, recording.profile.costs
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    seen: set[str] = set()
    for name, call in graph.calls.items():
        own = [p for p in call.parameters if p in costs.parameters and p not in seen]
        seen.update(own)
        block = _unit_block(recording, costs.calls[name].block)
        sizes[block] = sizes.get(block, 0) + sum(costs.parameters[p] for p in own)
        counts[block] = counts.get(block, 0) + len(own)
    return [GatheredUnit(block, nbytes, counts[block]) for block, nbytes in sizes.items() if nbytes]


def _unit_block(recording: SetupRecording, block: str) -> str:
    """The block of depth 1, or of depth 2 inside a container of several blocks with blocks inside."""
    graph = recording.profile.graph
    line = [path for path in (*ancestors(block), block) if path]
    top = line[0]
    children = graph.blocks[top].children if top in graph.blocks else ()
    nested = sum(bool(graph.blocks[c].children) for c in children if c in graph.blocks) >= 2
    return line[1] if nested and len(line) > 1 else top


def _hook(recording: SetupRecording, unit: GatheredUnit, phase: Phase, host: str) -> Task:
    """What the host does around a unit: a third of it in forward, and in backward, with the scatter, two thirds."""
    operations = (_UNIT_HOOKS + _PARAMETER_HOOKS * unit.parameters) * (1 if phase == "forward" else 2) / 3
    time_s = operations * (recording.device.dispatch_s or recording.profile.costs.between_s)
    return Task(f"hooks of {unit.block} {phase}", host, time_s, block=unit.block, kind="launch", phase=phase)


def sharded(step: RecordedStep, recording: SetupRecording, ranks: int, link: ClusterLink) -> RecordedStep:
    """A rank's step with the gathers of its weights and the scatters of its gradients."""
    if ranks < 2:
        return step
    units = units_of(recording)
    place = {unit.block: number for number, unit in enumerate(units)}
    uses: dict[str, list[list[str]]] = {phase: [[] for _ in units] for phase in ("forward", "backward")}
    for task in step.tasks.values():
        if task.resource == "device" and task.phase in uses and task.kind != "launch":
            number = place.get(_unit_block(recording, task.block)) if task.block else None
            if number is not None:
                uses[task.phase][number].append(task.name)
    tasks = dict(step.tasks)
    memory_s = 2 / recording.device.bandwidth_bytes_per_s
    link_tasks: list[Task] = []
    """In the order of the link: the next block's gather goes before this one's scatter."""
    waiting: list[Task] = []
    ahead = recording.device.kind == "cuda"
    """Whether gathers overlap with work; without streams each is waited for."""
    previous: list[str] = []
    host = "host" if "host" in step.resources else "device"
    hooks: dict[str, Task] = {}
    """By the launch that each comes before."""
    orders: tuple[tuple[Phase, range], ...] = (
        ("forward", range(len(units))),
        ("backward", range(len(units) - 1, -1, -1)),
    )
    for phase, order in orders:
        for number in order:
            unit, names = units[number], uses[phase][number]
            if not names:
                continue
            gather = Task(
                f"gather {unit.block} {phase}", "link", link.gather_s(unit.bytes, ranks),
                tuple(previous[-2:-1] if ahead else previous[-1:]),  # it was asked for when the unit before began
                kind="all-gather", phase="communication", bytes=unit.bytes,
            )  # fmt: skip
            launches = [a for a in tasks[names[0]].after if tasks[a].kind == "launch" and tasks[a].name != "replay"]
            if launches:  # of a graph the hooks are part, and are not run again
                hooks[launches[0]] = _hook(recording, unit, phase, host)
            tasks[names[0]] = replace(tasks[names[0]], after=(*tasks[names[0]].after, gather.name))
            link_tasks.append(gather)
            link_tasks += waiting if ahead else ()
            waiting.clear()
            previous.append(names[-1])
            if phase == "backward":
                scatter = Task(
                    f"scatter {unit.block}", "link", link.scatter_s(unit.bytes, ranks), (names[-1],),
                    kind="reduce-scatter", phase="communication", bytes=unit.bytes,
                )  # fmt: skip
                (waiting if ahead else link_tasks).append(scatter)
    link_tasks += waiting
    scatters = tuple(task.name for task in link_tasks if task.kind == "reduce-scatter")
    copied_s = 3 * sum(unit.bytes for unit in units) * memory_s
    joined = Task("copies of shards", "device", copied_s, scatters, kind="bucket", phase="communication")
    optimizers = {n: t.scaled(1 / ranks) for n, t in tasks.items() if t.phase == "optimizer" and t.kind != "launch"}
    found: dict[str, Task] = {}
    for name, task in tasks.items():
        if name in optimizers and joined.name not in found:
            found[joined.name] = joined
        if name in hooks:
            found[hooks[name].name] = hooks[name]
        found[name] = optimizers.get(name, task)
    found.setdefault(joined.name, joined)
    for task in link_tasks:
        found[task.name] = task
    return replace(step, tasks=found)
