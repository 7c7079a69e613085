"""Random numbers that do not depend on where a network is cut.

Before every call that may draw (dropout, anything opaque) the generator is seeded with a hash of the run's seed, the
step, the micro-batch and the call's name. So a mask is a function of these four: it is the same on one rank and on
eight, under every schedule, after a restart, and when a forward is repeated. Micro-batches are numbered over the whole
step, over all replicas. The generators the user draws from elsewhere are left as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator

import torch

from outcore.graph import Graph

_RANDOM = re.compile(
    r"dropout|rand|bernoulli|multinomial|normal_|uniform_|exponential|poisson|geometric_|cauchy_|rrelu|gumbel|"
    r"fractionalmaxpool|fractional_max_pool|drop_?path|stochastic_?depth|scaled_dot_product_attention|"
    r"multiheadattention|multi_head_attention|transformer|^lstm$|^gru$|^rnn$",
    re.IGNORECASE,
)


def random_calls(graph: Graph) -> frozenset[str]:
    """The calls that may draw random numbers."""
    blocks = graph.blocks
    return frozenset(
        name
        for name, call in graph.calls.items()
        if blocks[call.block].kind == "opaque" or _RANDOM.search(blocks[call.block].type)
    )


class RandomDraws:
    """The random numbers of one micro-batch of one step."""

    def __init__(self, seed: int, step: int, micro_batch: int, device: torch.device) -> None:
        self._prefix = f"{seed}/{step}/{micro_batch}/"
        self._device = device

    def seed(self, call: str) -> None:
        """Seed the generators for a call."""
        number = int.from_bytes(hashlib.blake2b((self._prefix + call).encode(), digest_size=7).digest(), "big")
        torch.default_generator.manual_seed(number)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(number)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A context after which the user's generators are as they were."""
        state = torch.default_generator.get_state()
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self._device)
