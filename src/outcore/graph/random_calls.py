"""Which calls may draw random numbers, by the names of what is called.

Opaque parts count: what they do is not known. It is asked where numbers have to be the same on several ranks, or in
several tiles, whoever draws them.
"""

from __future__ import annotations

import re

from outcore.graph.graph import Graph

_RANDOM = re.compile(
    r"dropout|rand|bernoulli|multinomial|normal_|uniform_|exponential|poisson|geometric_|cauchy_|rrelu|gumbel|"
    r"fractionalmaxpool|fractional_max_pool|drop_?path|stochastic_?depth|scaled_dot_product_attention|"
    r"multiheadattention|multi_head_attention|transformer|^lstm$|^gru$|^rnn$",
    re.IGNORECASE,
)


def may_be_random(name: str) -> bool:
    """Whether a call of that name may draw random numbers.

    >>> may_be_random("dropout2d"), may_be_random("conv2d")
    (True, False)
    """
    return _RANDOM.search(name) is not None


def random_calls(graph: Graph) -> frozenset[str]:
    """The calls that may draw random numbers."""
    blocks = graph.blocks
    return frozenset(
        name
        for name, call in graph.calls.items()
        if blocks[call.block].kind == "opaque" or may_be_random(blocks[call.block].type)
    )
