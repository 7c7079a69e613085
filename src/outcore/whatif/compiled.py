"""What `torch.compile` makes of a step: fused element-wise operations, and fewer and cheaper launches.

The default backend leaves matrix products to the same libraries and writes everything between them as few kernels of
its own. So the calls between two matrix products that read each other's results form a *group*; a group moves what
enters it and what leaves it, once, and once more what a norm or softmax must see whole before it can write. What stays
inside a group is never written. In backward the group reads the gradients of what left it and the values that entered
it, and writes the gradients of those.

    conv ─▶ norm ─▶ relu ─▶ add ─▶ conv        eager: 3 + 2 + 3 passes over the images; compiled: 2 + 1 + 1 (the other
                             ▲                 summand), the statistics being one pass of their own
                             └── from above

On a GPU a group takes its bytes at the rate that such kernels reach; on a CPU, its share of the bytes that the same
calls move one by one. The host does not go by the calls any more but by the kernels that are left: for each matrix
product, forward and backward, a few launches from a Python wrapper that also checks strides and allocates. That is
less than eager mode needs for a Transformer, whose calls are many and small, and more for a ResNet, whose norms and
activations were single calls. Together with CUDA graphs the host falls away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from outcore.graph import Graph
from outcore.whatif.recorded_step import RecordedStep, Task
from outcore.whatif.recording import SetupRecording

__all__ = ["FusedGroup", "compiled_tasks", "fused_groups"]

_WHOLE = ("norm", "softmax", "cross_entropy", "logsumexp", "mean", "var")
"""Kinds, by a part of their names, that read their input twice: once to sum over it, once to use the sum."""
_OPAQUE = ("lstm", "gru", "rnn", "multihead", "embeddingbag")
_STREAMED = 0.70
"""Share of the memory's rate that generated kernels reach."""
_ENTER = 12.0
"""CPU time of entering compiled code (guards, wrappers of arguments), once for each direction, over one operation's."""
_LAUNCHED = 42.0
"""Host time of a matrix product with the group around it, forward and backward, over the time of one operation: of
eight networks of 8 to 59 products on the host of an H200 37 to 47 (torch 2.11)."""


@dataclass
class FusedGroup:
    """Calls that become one kernel."""

    calls: list[str]
    moved_forward: int = 0
    moved_backward: int = 0
    """Bytes that the fused kernel moves."""
    alone_forward: int = 0
    alone_backward: int = 0
    """Bytes that its calls move one by one."""
    values: set[str] = field(default_factory=set)


def compiled_tasks(step: RecordedStep, recording: SetupRecording) -> RecordedStep:
    """The step as compiled code runs it; the optimizer stays as it is."""
    fusible = _fusible(recording)
    groups = fused_groups(recording.profile.graph, fusible)
    device = recording.device
    apart = "host" in step.resources
    unit_s = device.dispatch_s or recording.profile.costs.between_s
    scales: dict[str, float] = {}
    for group in groups:
        for phase, moved, alone in (
            ("forward", group.moved_forward, group.alone_forward),
            ("backward", group.moved_backward, group.alone_backward),
        ):
            names = [n for call in group.calls if (n := f"{call} {phase}") in step.tasks]
            if not names:
                continue
            eager_s = sum(step.tasks[n].time_s for n in names)
            if apart:
                fused_s = max(moved / (_STREAMED * device.bandwidth_bytes_per_s), device.launch_s)
            else:
                fused_s = eager_s * (min(1.0, moved / alone) if alone else 1.0)
            scales |= dict.fromkeys(names, min(1.0, fused_s / eager_s) if eager_s else 1.0)
    tasks = {n: t.scaled(scales.get(n, 1.0)) if n in scales else t for n, t in step.tasks.items()}
    changed = replace(step, tasks=tasks)
    if not apart:
        return _entering(changed, _ENTER * unit_s)
    products = sum(name not in fusible for name in recording.profile.graph.calls)
    return _launched(changed, _LAUNCHED * unit_s * max(1, products or len(groups)))


def _launched(step: RecordedStep, time_s: float) -> RecordedStep:
    """The step whose launches of forward and backward take so long together."""
    names = [n for n, t in step.tasks.items() if t.resource == "host" and t.phase in ("forward", "backward")]
    eager_s = sum(step.tasks[n].time_s for n in names)
    return step.scale(names, time_s / eager_s) if eager_s else step


def _entering(step: RecordedStep, time_s: float) -> RecordedStep:
    for phase in ("forward", "backward"):
        first = next((n for n, t in step.tasks.items() if t.phase == phase), None)
        if first is not None:
            task = Task(f"enter compiled {phase}", "device", time_s, kind="launch", phase=phase)
            step = step.insert(task, place=first)
    return step


def _fusible(recording: SetupRecording) -> set[str]:
    costs = recording.profile.costs
    return {
        name
        for name, cost in costs.calls.items()
        if not cost.flops_forward and not any(word in cost.type.lower() for word in _OPAQUE)
    }


def fused_groups(graph: Graph, fusible: set[str]) -> list[FusedGroup]:
    """Calls that read each other's results with no matrix product between them, with the bytes they move."""
    group_of: dict[str, int] = {}
    members: dict[int, list[str]] = {}
    made: dict[str, str] = {v: name for name, call in graph.calls.items() for v in call.outputs}
    barrier: dict[str, int] = {}
    """By call: the number of matrix products that stand before it on its longest way from the input."""
    for name, call in graph.calls.items():
        before = [made[v] for v in call.inputs if v in made]
        depth = max((barrier[b] + (b not in fusible) for b in before), default=0)
        barrier[name] = depth
        if name not in fusible:
            continue
        near = [b for b in before if b in fusible and barrier[b] == depth]
        numbers = sorted({group_of[b] for b in near})
        number = numbers[0] if numbers else len(members)
        members.setdefault(number, [])
        for other in numbers[1:]:
            for moved in members.pop(other):
                group_of[moved] = number
                members[number].append(moved)
        group_of[name] = number
        members[number].append(name)
    order = {name: place for place, name in enumerate(graph.calls)}
    return [_counted(graph, sorted(names, key=order.__getitem__)) for names in members.values()]


def _counted(graph: Graph, calls: list[str]) -> FusedGroup:
    inside = set(calls)
    outputs = {v for name in calls for v in graph.calls[name].outputs}
    readers: dict[str, set[str]] = {}
    for name, call in graph.calls.items():
        for v in call.inputs:
            readers.setdefault(v, set()).add(name)
    group = FusedGroup(calls, values=outputs)
    entering = dict.fromkeys(v for name in calls for v in graph.calls[name].inputs if v not in outputs)
    leaving = [v for v in outputs if v in graph.outputs or readers.get(v, set()) - inside]
    twice = {v for name in calls if _is_whole(graph, name) for v in _sources(graph, name, entering, outputs)}
    size = {v: graph.values[v].bytes for v in (*entering, *outputs)}
    read = sum(size[v] * (2 if v in twice else 1) for v in entering)
    group.moved_forward = read + sum(size[v] for v in leaving)
    gradients = sum(size[v] for v in entering if graph.values[v].requires_grad)
    summed = any(_is_whole(graph, name) for name in calls)
    group.moved_backward = (read + sum(size[v] for v in leaving) * (2 if summed else 1) + gradients) if gradients else 0
    for name in calls:
        call = graph.calls[name]
        taken = sum(graph.values[v].bytes for v in call.inputs)
        given = sum(graph.values[v].bytes for v in call.outputs)
        whole = _is_whole(graph, name)
        group.alone_forward += taken * (2 if whole else 1) + given
        group.alone_backward += 5 * taken if whole else given + 2 * taken
    return group


def _sources(graph: Graph, name: str, entering: dict[str, None], inside: set[str]) -> Iterator[str]:
    """What enters the group and must be read before a call that sums: its inputs, and all that those are made of."""
    made = {v: n for n, call in graph.calls.items() for v in call.outputs if v in inside}
    open_, seen = list(graph.calls[name].inputs), set[str]()
    while open_:
        value = open_.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in entering:
            yield value
        elif value in made:
            open_ += graph.calls[made[value]].inputs


def _is_whole(graph: Graph, name: str) -> bool:
    kind = graph.blocks[graph.calls[name].block].type.lower()
    return any(word in kind for word in _WHOLE)
