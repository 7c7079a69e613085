"""The cache state that a call finds in a step.

Timed over and over, a call finds everything it touches in the cache: its weights, its saved tensors, even the memory of
its output. In a step the results of the call before it are there, and of the rest what the step has not pushed out
since it was last touched: a layer's weights wait for a whole step, what it saved waits until the later layers are
through, forward and backward. That is few bytes for the last layer and for a network of tiny tensors, and many for the
first layer of a large one (`bytes_touched`). So before every timed run so many other bytes are touched, and then the
tensors that the call before would have written are written again: a forward call's inputs, a backward call's incoming
gradients, as much of them as the cache holds beside what was read meanwhile. On a CPU the interpreter's and autograd's
own code and data, which every call of a step uses, are pushed out with the rest; a tiny call, forward and backward,
brings them back. And what is small is moved along there: a processor learns the branches of a pool over the same small
image within some runs (63 µs, where images that differ take 144), and in training images differ.

On a GPU the whole cache is filled with something else, before every call alike.

Timed warm, networks of memory-bound layers come out 10 to 20 % too fast on CPUs and GPUs alike; timed all cold, small
ones up to 70 % too slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outcore.cost.costs import Costs
from outcore.graph import Graph

_CPU_CACHE_BYTES = 64 * 2**20
"""As much as the cores of many processors share, or more; touching it takes milliseconds."""

_LEARNED, _MOVED = 2**17, 7919
"""Numbers of a tensor that is small enough to be learned, and by how many they are moved."""
_TOUCHED_BYTES_PER_S = 8e9
"""About how fast one core reads and writes memory."""


@dataclass(frozen=True, slots=True)
class Touched:
    """What a step touches from one use of a call's tensors to the next, in bytes."""

    forward: int
    """Since the weights were used in the step before."""
    backward: int
    """Since the call saved tensors in its forward."""


def bytes_touched(graph: Graph, costs: Costs) -> dict[str, Touched]:
    """By call, how much else of its memory a training step touches before the call runs."""
    found, later = dict[str, int](), 0
    for name in reversed(list(graph.calls)):
        cost = costs.calls[name]
        derived = sum(saved.bytes for saved in cost.saved if saved.kind == "derived")
        later += cost.output_bytes + derived + 2 * cost.parameter_bytes  # weights and their gradients
        found[name] = later
    return {name: Touched(later, backward) for name, backward in found.items()}


class CacheState:
    """The caches of a device, as a step leaves them for a call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._elsewhere = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.cache_bytes = _CPU_CACHE_BYTES
        if device.type == "cuda":
            self.cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)

    def hold(self) -> None:
        """Allocate the memory that is needed on a GPU; until `release`."""
        if self.device.type == "cuda":
            self._elsewhere = torch.empty(2 * self.cache_bytes, dtype=torch.uint8, device=self.device)

    def release(self) -> None:
        """Free it."""
        self._elsewhere = torch.empty(0, dtype=torch.uint8, device="cpu")

    def before(
        self, warm: Sequence[torch.Tensor], touched_bytes: int | None = None, seconds: float = math.inf
    ) -> Callable[[], None]:
        """A function to call before every timed run.

        Args:
            warm: what the call before would have written; in the cache, after it.
            touched_bytes: how many other bytes a step touches since the rest was last used; as many as a cache holds if
                not given.
            seconds: how long touching them may take, on a CPU; the cache is emptied in part if that is too short.
        """
        if self.device.type == "cuda":
            pieces = self._pieces(warm)

            def arrange() -> None:
                self._elsewhere.zero_()
                for piece in pieces:
                    piece.mul_(1)

            return arrange

        count = self.cache_bytes if touched_bytes is None else min(self.cache_bytes, touched_bytes)
        count = int(min(count, _TOUCHED_BYTES_PER_S * seconds))
        if self._elsewhere.numel() < count:
            self._elsewhere = torch.zeros(count, dtype=torch.uint8, device="cpu")
        dense = [t.data for t in warm if t.layout is torch.strided and t.is_floating_point() and t.numel() < _LEARNED]
        moved = [t.view(-1) for t in dense if t.is_contiguous()]
        others, tiny = self._elsewhere[:count], torch.ones(1, requires_grad=True, device="cpu")

        def arrange_cpu() -> None:
            others.add_(1)
            with torch.inference_mode(False), torch.enable_grad():  # whatever mode the call runs in
                torch.autograd.grad(tiny.view(1), [tiny], [tiny])
            for flat in moved:
                flat.copy_(flat.roll(_MOVED))
            for tensor in warm:
                tensor.detach().clone()

        return arrange_cpu

    def _pieces(self, warm: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The ends of the tensors' memory, together half of the cache: the inputs they were made from take the rest."""
        left, found = self.cache_bytes // 2, []
        for tensor in {t.untyped_storage().data_ptr(): t for t in warm if not t.is_sparse and t.numel()}.values():
            memory = torch.empty(0, dtype=tensor.dtype, device=self.device).set_(tensor.untyped_storage())
            count = min(memory.numel(), left // memory.element_size())
            if count and tensor.dtype != torch.bool:
                found.append(memory[memory.numel() - count :])
                left -= count * memory.element_size()
        return found
