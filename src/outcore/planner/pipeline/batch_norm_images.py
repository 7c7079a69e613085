"""How many images a batch norm looks at under a plan.

Batch norms are the one place where a plan changes what is computed: each micro-batch is normalised by its own mean and
variance, so a batch of 8 that two replicas share, or that passes in two pieces, is normalised 4 images at a time. That
is a choice about the network and not about speed. A plan therefore says in words what its norms see, prefers the most
images where the time is the same, and can be asked to let them see all (`batch_norm="synchronised"`), which needs the
share of every replica in one piece.

Invariant: `norms_see` names fewer images than the batch has exactly if the plan normalises over fewer.
"""

from __future__ import annotations

from outcore.graph import Graph
from outcore.graph.record.part_of_batch import batch_size
from outcore.ops import find, operation
from outcore.program.plan.document import Plan


def batch_norms(graph: Graph) -> list[str]:
    """The calls that normalise by the batch they are given: batch norms in training mode."""
    modules = dict(graph.executable[0].named_modules()) if graph.executable is not None else {}
    found = []
    for name, call in graph.calls.items():
        block = graph.blocks[call.block]
        if find(block.type) is not operation("batch_norm"):
            continue
        module = modules.get(call.block)
        if "True" in call.detail if block.kind == "function" else module is None or module.training:
            found.append(name)
    return found


def own_norms(graph: Graph) -> list[str]:
    """Those that are no module of torch's own: they see a micro-batch, and no plan lets them see more."""
    return [name for name in batch_norms(graph) if graph.blocks[graph.calls[name].block].kind == "function"]


def images_seen(plan: Plan, samples: int) -> int:
    """Images that a batch norm looks at in a step on so many."""
    if plan.batch_norm == "synchronised":
        return samples
    return max(1, samples // (plan.replicas * plan.micro_batches * plan.batches))


def norms_see(plan: Plan, graph: Graph, samples: int | None = None) -> str | None:
    """What batch norms see under a plan, in words; None if there are none.

    Args:
        plan: the plan.
        graph: the network.
        samples: of a step, over all replicas; those of the recorded batch if not given.
    """
    if not batch_norms(graph):
        return None
    samples = samples or batch_size(graph)
    seen = images_seen(plan, samples)
    moved = ", their running statistics move once a step" if plan.batch_norm == "deferred" else ""
    return f"batch norms see {seen} of {samples} images{moved}"
