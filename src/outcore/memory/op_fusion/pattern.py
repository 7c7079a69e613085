"""Who reads a value, and which ReLU is its only reader.

Norms, biases and sums can be one operation with the ReLU that follows, if nothing else sees the value between the two:
no other call reads it, it is not an output of the model, and no hook of the user's looks at it.
"""

from __future__ import annotations

from torch import nn

from outcore.graph import Graph
from outcore.memory.saved_tensors.recompute_batch_norm import RELUS


class ReaderPatterns:
    """Looks up the readers of values in one network."""

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        self.graph, self.model = graph, model
        self.steps = graph.recording.calls()
        """Call -> how it runs."""
        self._readers: dict[str, list[str]] = {}
        for name, call in graph.calls.items():
            for value in call.inputs:
                self._readers.setdefault(value, []).append(name)

    def relu(self, call: str) -> str | None:
        """The ReLU that is the only reader of the output of a call, if there is one."""
        outputs = self.graph.calls[call].outputs
        if len(outputs) != 1 or outputs[0] in self.graph.outputs:
            return None
        after = self._readers.get(outputs[0], [])
        return after[0] if len(after) == 1 and self._rectifies(after[0]) else None

    def readers(self, value: str) -> list[str]:
        """The calls that read a value by its name."""
        return self._readers.get(value, [])

    def behind_views(self, value: str) -> list[str]:
        """The calls that read the memory that begins with a value, directly or through views; empty if the user sees
        it.

        A view that a hook looks at, or that has another type, counts as a reader.
        """
        found, waiting = [], [value]
        while waiting:
            seen = waiting.pop()
            if seen in self.graph.outputs:
                return []
            for name in self._readers.get(seen, ()):
                call = self.graph.calls[name]
                views = [v for v in call.outputs if self.graph.values[v].base == value and v not in call.mutates]
                alike = all(self.graph.values[v].dtype == self.graph.values[value].dtype for v in views)
                if views and views == list(call.outputs) and alike and not call.mutates and not self.hooked(name):
                    waiting += views
                elif name not in found:
                    found.append(name)
        return found

    def hooked(self, call: str) -> bool:
        """Whether a call has hooks of the user's."""
        step = self.steps[call]
        return step.kind == "module" and hooked(self.model.get_submodule(step.target))

    def _rectifies(self, call: str) -> bool:
        if self.graph.blocks[self.graph.calls[call].block].type not in RELUS:
            return False
        return not self.hooked(call)


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks of the user's."""
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(kinds)
