"""Which ReLU is all that happens to a value.

Norms, biases and sums can be one operation with the ReLU that follows, if nobody else sees what is between the two: no
other call reads it, it is not an output of the model, and no hook of the user's looks at it.
"""

from __future__ import annotations

from torch import nn

from outcore.graph import Graph
from outcore.graph.recording import Step
from outcore.memory.renorm import RELUS

__all__ = ["Followers", "hooked"]


class Followers:
    """Looks them up in one network."""

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        assert graph.executable is not None
        self.graph, self.model = graph, model
        self.steps: dict[str, Step] = {s.name: s for s in graph.executable[1].steps if s.kind != "guard"}
        """Call -> how it runs."""
        self._readers: dict[str, list[str]] = {}
        for name, call in graph.calls.items():
            for value in call.inputs:
                self._readers.setdefault(value, []).append(name)

    def relu(self, call: str) -> str | None:
        """The ReLU that is all that happens to the output of a call."""
        outputs = self.graph.calls[call].outputs
        if len(outputs) != 1 or outputs[0] in self.graph.outputs:
            return None
        after = self._readers.get(outputs[0], [])
        return after[0] if len(after) == 1 and self._rectifies(after[0]) else None

    def _rectifies(self, call: str) -> bool:
        if self.graph.blocks[self.graph.calls[call].block].type not in RELUS:
            return False
        step = self.steps[call]
        return step.kind != "module" or not hooked(self.model.get_submodule(step.target))


def hooked(module: nn.Module) -> bool:
    """Whether something of the user's is called with a module."""
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(kinds)
