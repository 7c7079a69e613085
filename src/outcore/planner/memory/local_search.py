"""Where a search for policies has ended, change a few things at random, repair what breaks, and keep what is faster.

A search that goes down by the best step ends where no single step helps. Two changes that help only together (keep a
block's input, make what follows it again) are not found that way. So some choices are thrown over, those that cost
most first; what is then above the budget is given up again and what has room is taken back, by the search's own steps.
It ends when nothing helped for a while. Ruin and recreate, after Schrimpf et al., J. Comp. Phys. 159 (2000).

`squeezed` does the same for the smallest peak: every choice in turn, judged by the moments near the peak together, so
that one of several equal peaks can go down before the others. `drifted` goes on where that ends: it takes any change of
a few choices that makes nothing worse, so that it walks along what is equal until something lower is beside it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from outcore.program.policies import KEEP, Keep, Policy, Recompute

if TYPE_CHECKING:
    from outcore.planner.memory.evaluate import StepUnderPolicies
    from outcore.planner.memory.search import Assignment, PolicySearch

_PATIENCE = 60
"""Tries without success before it ends."""
_TOO_SLOW = 1.03
"""What is slower than this before anything is taken back is not worth finishing."""
_SLOWER, _LITTLE = 1.3, 1e-3
"""How much slower a lower peak may be while drifting; buffers of a smaller share of the peak are left as they are."""
_NEAR = 0.9
"""Moments above this share of the peak count."""


def perturbed(search: PolicySearch, current: Assignment) -> Assignment:
    """An assignment within the search's budget that is no slower than one that is."""
    draw, failed = random.Random(0), 0
    while current.outcome.extra_s > 0 and failed < _PATIENCE and not search.ended():
        failed += 1
        tried = search.assign(_thrown_over(search, current, draw))
        if not tried.fits(search.budget):
            tried = search.give_up(tried, most=8)
        if not tried.fits(search.budget) or tried.outcome.time_s > _TOO_SLOW * current.outcome.time_s:
            continue
        tried = search.take_back(tried)
        if tried.outcome.time_s < current.outcome.time_s - 1e-3 * search.epsilon_s:
            current, failed = tried, 0
    return current


def _thrown_over(search: PolicySearch, current: Assignment, draw: random.Random) -> dict[str, Policy]:
    """The policies with one to three of them changed, mostly expensive ones that are now kept."""
    policy, buffers = dict(current.policy), search.keeping.buffers
    paid = [n for n in search.keeping.resolved(policy) if not isinstance(policy.get(n, KEEP), Keep)]
    everything = list(search.choices)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if paid and draw.random() < 0.6:
            some = draw.sample(paid, min(3, len(paid)))
            name = max(some, key=lambda n: buffers[n].again_s if isinstance(policy.get(n), Recompute) else 0.0)
            kept = draw.random() < 0.7
        else:
            name, kept = draw.choice(everything), False
        policy[name] = KEEP if kept else draw.choice((KEEP, *search.choices[name]))
    return policy


def squeezed(search: PolicySearch, current: Assignment) -> Assignment:
    """An assignment whose peak is no higher."""
    better = True
    while better and not search.ended():
        better = False
        for name, choices in search.choices.items():
            near = _NEAR * current.outcome.peak_bytes
            least, best = 0.999 * _above(current.outcome, near), None
            for how in (KEEP, *choices):
                if how != current.policy.get(name, KEEP):
                    tried = search.assign({**current.policy, name: how})
                    found = _above(tried.outcome, near)
                    if found < least and tried.outcome.peak_bytes <= current.outcome.peak_bytes:
                        least, best = found, tried
            if best is not None:
                current, better = best, True
            if search.ended():
                break
    return current


def drifted(search: PolicySearch, current: Assignment) -> Assignment:
    """An assignment whose peak is no higher or within the budget; within it, no slower."""
    draw, failed, slowest = random.Random(0), 0, _SLOWER * current.outcome.time_s
    little = _LITTLE * current.outcome.peak_bytes
    names = [name for name in search.choices if search.keeping.buffers[name].bytes > little]
    while names and failed < _PATIENCE * len(names) and not search.ended():
        failed += 1
        policy = dict(current.policy)
        for name in draw.sample(names, min(len(names), draw.choice((1, 1, 1, 2, 2, 3)))):
            policy[name] = draw.choice((KEEP, *search.choices[name]))
        tried = search.assign(policy)
        peak, time_s = current.outcome.peak_bytes, current.outcome.time_s
        lower = tried.outcome.peak_bytes < peak > search.budget and tried.outcome.time_s <= slowest
        if lower or (tried.outcome.peak_bytes <= max(peak, search.budget) and tried.outcome.time_s <= time_s):
            failed = 0 if lower or tried.outcome.time_s < time_s - search.epsilon_s else failed
            current = tried
    return current


def _above(outcome: StepUnderPolicies, near: float) -> float:
    """How far the moments near the peak are above a height; squares, so that the highest count most."""
    over = np.maximum(outcome.curve / near - 1, 0)
    return float(over @ over) if outcome.time_s < float("inf") else float("inf")
