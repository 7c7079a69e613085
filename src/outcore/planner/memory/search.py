"""Which buffers to keep, move, encode or make again, so that a step fits a budget and is as fast as it can be.

The choices are not independent: what is made again brings its sources back earlier, what is moved shares one link. So
every assignment is evaluated as a whole (`StepModel.evaluate`, under a millisecond for a ResNet-50), and the search is
built on that:

1. *Give up*: from the plain step, the choice that takes most off the moments above the budget for the least time, again
   and again, until nothing is above.
2. *Segments*: from the other end, keep only what crosses a few narrow places of the network and make everything else
   again (Chen et al., 2016), for several numbers of segments.
3. *Take back*: from each of these, keep again whatever fits, the most time per byte first; then take turns giving up
   something expensive and repairing what that breaks, while time is left.
4. *Perturb* (`outcore.planner.memory.local_search`): change a few choices at random and repair, as long as that helps
   now and then; where nothing fits, *drift* down along changes that make nothing worse.

The fastest that fits wins. If none fits, the smallest peak that was found is the smallest budget.

Time limits are counted in evaluations, at what one takes on an ordinary core, and not by the clock: a busy machine
searches longer and finds the same, so a plan, and the budget that a refusal names, do not depend on what else ran.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from outcore.cost.buffers import Buffer
from outcore.planner.memory.evaluate import StepModel, StepUnderPolicies
from outcore.planner.memory.local_search import drifted, perturbed, squeezed
from outcore.program.policies import KEEP, OFFLOAD_EARLY, RECOMPUTE, Encode, Keep, Offload, Policies, Policy, Recompute

_TRIED, _MOST = 10, 60
"""Choices that are evaluated at every step; at most, if none of the first helps."""
_ALIKE = 0.7
"""A choice is repeated for what is alike while it scores at least this share of the first time."""
_RUN = 64
"""So many that are alike are kept again at once, if they fit; else half of them."""
_FAR = 1.15
"""An assignment that was brought down to a smaller budget and is slower than this is searched for anew."""
_EVALUATION_S, _BUFFER_S = 4e-5, 2e-7
"""What an evaluation takes, and more for each buffer, with the search around it."""
_SEGMENTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)


@dataclass(frozen=True)
class Assignment:
    """Policies and what a step takes under them."""

    policy: Policies
    outcome: StepUnderPolicies

    def fits(self, budget_bytes: int) -> bool:
        """Whether it stays within a budget."""
        return self.outcome.peak_bytes <= budget_bytes


def fit(
    keeping: StepModel,
    budget_bytes: int,
    *,
    time_limit_s: float = 4.0,
    near: Policies | None = None,
    least: Policies | None = None,
) -> Assignment:
    """The fastest assignment within a budget; if there is none, the one with the smallest peak.

    A search that may move things can end where it has moved the wrong ones, so where it moves any, or finds nothing,
    one that may not has its turn.

    Args:
        keeping: the network's step.
        budget_bytes: the most it may hold.
        time_limit_s: for each part of the search, on an ordinary core.
        near: the assignment of a budget that was a little larger: where the way down from it is short, that is all.
        least: the smallest assignment that an earlier search of the same network has found.
    """
    search = PolicySearch(keeping, budget_bytes, time_limit_s)
    if near is not None and (lower := search.lowered(near)) is not None:
        return lower
    found = [search.run()]
    if keeping.tier is not None and not (found[0].fits(budget_bytes) and found[0].outcome.transfers is None):
        found.append(PolicySearch(keeping, budget_bytes, time_limit_s, moving=False).run())
    search.begin()
    if least is not None and not any(a.fits(budget_bytes) for a in found):
        known = search.assign(search.allowed(least))
        found.append(search.take_back(known) if known.fits(budget_bytes) else known)
    if not any(a.fits(budget_bytes) for a in found):
        smaller = min((squeezed(search, a) for a in found), key=_peak)
        search.begin()
        found = [smaller if smaller.fits(budget_bytes) else drifted(search, smaller)]
        if not found[0].fits(budget_bytes):
            return found[0]
    if min(a.outcome.extra_s for a in found) > 0:  # from below, too
        lowest = PolicySearch(keeping, 0, time_limit_s).run()
        search.begin()
        found += [search.polish(search.take_back(a)) for a in (lowest,) if a.fits(budget_bytes)]
    fitting = [a for a in found if a.fits(budget_bytes)]
    return perturbed(search, min(fitting, key=lambda a: a.outcome.time_s))


def smallest(keeping: StepModel, *, time_limit_s: float = 4.0) -> Assignment:
    """The assignment with the smallest peak."""
    return fit(keeping, 0, time_limit_s=time_limit_s)


def _peak(assignment: Assignment) -> int:
    return assignment.outcome.peak_bytes


class PolicySearch:
    """Looks for the policies of one network that meet a budget at the least time, within a time limit."""

    def __init__(self, keeping: StepModel, budget_bytes: int, time_limit_s: float, *, moving: bool = True) -> None:
        self.keeping, self.budget, self.time_limit_s, self.moving = keeping, budget_bytes, time_limit_s, moving
        self.evaluation_s = _EVALUATION_S + _BUFFER_S * len(keeping.rows)
        self.begin()
        known = {b.name: keeping.choices(b) for b in keeping.buffers.values()}
        allowed = {n: [c for c in choices if moving or not isinstance(c, Offload)] for n, choices in known.items()}
        self.choices = {n: choices for n, choices in allowed.items() if choices}
        self.start = {n: RECOMPUTE for n, c in self.choices.items() if RECOMPUTE in c and not self.saved(n)}
        """Buffers that backward does not need are made again on the way unless it is better to hold them."""
        self.alike, self.repeats = self.grouped(), True
        self.epsilon_s = 1e-4 * max(keeping.plain_s, 1e-9)

    def begin(self, share: float = 1.0) -> None:
        """Start the clock: the search has the whole time limit from now on, or a share of it."""
        self.left_s = share * self.time_limit_s

    def ended(self) -> bool:
        """Whether the time is used up."""
        return self.left_s <= 0

    def allowed(self, policy: Policies) -> dict[str, Policy]:
        """What of an assignment from elsewhere, of another network perhaps, this network can have."""
        mine = {n: how for n, how in policy.items() if n in self.keeping.buffers}
        return {n: how for n, how in mine.items() if isinstance(how, Keep) or how in self.choices.get(n, ())}

    def lowered(self, policy: Policies) -> Assignment | None:
        """An assignment brought down to the budget, if that is only a few steps away and costs little."""
        self.begin(0.5)
        before = self.assign({**self.start, **self.allowed(policy)})
        after = self.descend(before)
        if not after.fits(self.budget) or after.outcome.time_s > _FAR * before.outcome.time_s:
            self.begin()
            return None
        return self.polish(self.take_back(after))

    def saved(self, name: str) -> bool:
        """Whether backward needs a buffer itself."""
        return bool(self.keeping.buffers[name].savers)

    def grouped(self) -> dict[str, list[str]]:
        """Buffer -> the buffers that are alike: the steps of a recurrence, the layers of a transformer."""
        groups: dict[Hashable, list[str]] = {}
        for name, choices in self.choices.items():
            buffer = self.keeping.buffers[name]
            call = self.keeping.graph.calls[self.keeping.order[buffer.born]]
            type_ = self.keeping.graph.blocks[call.block].type
            key = (type_, buffer.kind, buffer.bytes, buffer.need, len(buffer.savers), tuple(choices))
            groups.setdefault(key, []).append(name)
        return {name: names for names in groups.values() for name in names}

    def run(self) -> Assignment:
        """Search; the fastest that fits, else the smallest."""
        plain = self.assign(self.start)
        if plain.fits(self.budget):
            return plain
        segments = sorted((self.assign(p) for p in self.segmented()), key=lambda a: a.outcome.peak_bytes)
        found = [self.descend(plain)]
        fitting = [a for a in segments if a.fits(self.budget)]
        found += sorted(fitting, key=lambda a: a.outcome.time_s)[:3] or [self.descend(a) for a in segments[:2]]
        self.repeats = False  # one by one is better where there is time for it
        found.append(self.descend(plain))
        done = [self.take_back(a) for a in found if a.fits(self.budget)]
        if not done and self.budget:  # what goes far below the budget may lead to what is just below it
            lowest = PolicySearch(self.keeping, 0, self.time_limit_s, moving=self.moving).run()
            self.begin()
            done = [self.take_back(lowest)] if lowest.fits(self.budget) else []
            found.append(lowest)
        if not done:
            return min(found, key=lambda a: a.outcome.peak_bytes)
        return self.polish(min(done, key=lambda a: a.outcome.time_s))

    def descend(self, current: Assignment) -> Assignment:
        """Go down to the budget in steps: what helps a little below the peak differs from what helps far below."""
        target = self.budget
        while not current.fits(target) and not self.ended():
            peak = current.outcome.peak_bytes
            self.budget = max(target, int(0.92 * peak))
            lower = self.give_up(current)
            if lower.outcome.peak_bytes >= peak:
                break
            current = lower
        self.budget = target
        return current

    def assign(self, policy: Policies) -> Assignment:
        """These policies with the predicted time and peak of a step under them."""
        self.left_s -= self.evaluation_s
        return Assignment(policy, self.keeping.evaluate(policy))

    # Giving up

    def give_up(self, current: Assignment, most: int = 10_000) -> Assignment:
        """Take the best step down until the budget is met or nothing helps."""
        for _ in range(most):
            if current.fits(self.budget) or self.ended():
                break
            best, change, best_score = None, None, 0.0
            for i, (name, how) in enumerate(self.promising(current)):
                if i >= _TRIED and best is not None:
                    break
                tried = self.assign({**current.policy, name: how})
                score = self.score(current, tried)
                if score > best_score:
                    best, change, best_score = tried, (name, how), score
            if best is None or change is None:
                break
            current = self.repeat(current, best, *change)
        return current

    def repeat(self, before: Assignment, after: Assignment, name: str, how: Policy) -> Assignment:
        """Do what helped once to more and more of what is alike, as long as it helps about as much."""
        old = before.policy.get(name, KEEP)
        rest = [n for n in self.alike[name] if n != name and before.policy.get(n, KEEP) == old and self.repeats]
        place = self.keeping.buffers[name].born
        rest.sort(key=lambda n: abs(self.keeping.buffers[n].born - place))
        score, count = self.score(before, after), 1
        while rest and not after.fits(self.budget):
            tried = self.assign({**after.policy, **dict.fromkeys(rest[:count], how)})
            found = self.score(after, tried)
            if found < _ALIKE * score:
                break
            after, rest, count = tried, rest[count:], 2 * count
        return after

    def score(self, before: Assignment, after: Assignment) -> float:
        """What a change takes off the moments above the budget, for the time it costs."""
        gain = self.excess(before.outcome) - self.excess(after.outcome)
        return gain / (max(0.0, after.outcome.time_s - before.outcome.time_s) + self.epsilon_s)

    def excess(self, outcome: StepUnderPolicies) -> float:
        """By how much the step is above the budget, summed over its moments."""
        over = np.maximum(outcome.curve - self.budget, 0)
        return float(over.sum()) + max(0, outcome.peak_bytes - self.budget)

    def promising(self, current: Assignment) -> list[tuple[str, Policy]]:
        """Choices, those that look best first, by how long a buffer would be away while there is too much."""
        over = np.concatenate([[0.0], np.cumsum(current.outcome.curve > self.budget)])
        keeping = self.keeping
        down: list[tuple[float, str, Policy]] = []
        turned: list[tuple[float, str, Policy]] = []
        last: list[tuple[float, str, Policy]] = []
        for name, choices in self.choices.items():
            buffer, how = keeping.buffers[name], current.policy.get(name, KEEP)
            if isinstance(how, Recompute):
                if (span := current.outcome.recomputed.get(name)) is not None:
                    begins, ends = (keeping.backward_at[i] for i in span)
                    weight = (over[ends] - over[begins]) * self.brought_back(buffer, current)
                    turned += [(weight, name, other) for other in (KEEP, *choices) if other != how and weight > 0]
                continue
            if not isinstance(how, Keep) or not buffer.savers:
                continue
            gone, back = keeping.forward_at[max(buffer.last, buffer.held)] + 1, keeping.backward_at[max(buffer.savers)]
            moments = over[back] - over[gone] if back > gone else 0.0
            if moments <= 0:
                continue
            for choice in choices:
                cost = self.rough_cost_s(buffer, choice, current) + self.epsilon_s
                (last if choice == OFFLOAD_EARLY else down).append((buffer.bytes * moments / cost, name, choice))
        for found in (down, turned, last):
            found.sort(key=lambda row: (row[0], row[1], str(row[2])), reverse=True)
        half = _TRIED // 2
        best = down[:half] + turned[:half] + down[half:_MOST] + turned[half:_MOST] + last
        return [(name, choice) for _, name, choice in best]

    def brought_back(self, buffer: Buffer, current: Assignment) -> int:
        """Bytes that come back only because a buffer is made again: it and what it is made from."""
        made = current.outcome.recomputed
        return buffer.bytes + sum(self.keeping.buffers[s].bytes for s in buffer.sources if s in made)

    def rough_cost_s(self, buffer: Buffer, choice: Policy, current: Assignment) -> float:
        """Roughly how many seconds a policy for a buffer adds to a step."""
        if isinstance(choice, Recompute):
            on_the_way = [self.keeping.buffers[s] for s in buffer.sources if not self.saved(s)]
            return buffer.again_s + sum(b.again_s for b in on_the_way)
        if choice == OFFLOAD_EARLY:
            assert self.keeping.tier is not None
            return 0.5 * buffer.bytes / self.keeping.tier.out_bytes_per_s
        if isinstance(choice, Offload):
            tier, moved = self.keeping.tier, current.outcome.transfers
            assert tier is not None
            busy = moved is not None and moved.stall_s > 0
            return buffer.bytes / tier.in_bytes_per_s * (1.0 if busy else 0.05)
        return 2.5 * buffer.bytes / self.keeping.memory_bytes_per_s

    # Segments

    def segmented(self) -> Iterator[Policies]:
        """Assignments that keep only what crosses a few narrow places."""
        keeping = self.keeping
        values = [b for b in keeping.buffers.values() if b.kind == "value"]
        count = len(keeping.order)
        crossing = np.zeros(count + 1)
        saved = np.zeros(count)
        for b in values:
            crossing[b.done] += b.bytes
            crossing[max(b.last, b.done)] -= b.bytes
            saved[b.done] += b.bytes if b.savers else 0
        crossing = np.cumsum(crossing)[:count]
        reached = np.cumsum(saved)
        for pieces in _SEGMENTS:
            places = set()
            for k in range(1, pieces):
                low, high = np.searchsorted(reached, reached[-1] * np.array([k - 0.5, k + 0.5]) / pieces)
                window = crossing[low : max(high, low + 1)]
                places.add(int(low) + int(window.argmin()))
            kept = {b.name for b in values if any(b.done <= p < b.last for p in places)}
            yield {n: RECOMPUTE for n, c in self.choices.items() if RECOMPUTE in c and n not in kept} | {
                n: c[0] for n, c in self.choices.items() if RECOMPUTE not in c and isinstance(c[0], Encode)
            }

    # Taking back

    def take_back(self, current: Assignment) -> Assignment:
        """Keep again whatever fits, the most time per byte first."""
        needed = self.keeping.resolved(current.policy)
        paid = sorted(
            (n for n in needed if not isinstance(current.policy.get(n, KEEP), Keep)),
            key=lambda n: (-self.worth(n, current.policy[n]), self.keeping.buffers[n].born),
        )
        waiting: list[list[str]] = []
        for _, group in itertools.groupby(paid, key=lambda n: id(self.alike[n])):
            names = list(group)
            waiting += [names[k : k + _RUN] for k in range(0, len(names), _RUN)]
        waiting.reverse()
        while waiting and not self.ended():
            names = waiting.pop()
            tried = self.assign({**current.policy, **dict.fromkeys(names, KEEP)})
            if tried.fits(self.budget) and tried.outcome.time_s <= current.outcome.time_s:
                current = tried
            elif len(names) > 1:  # not all of them; the earlier half is worth as much as the later
                half = len(names) // 2
                waiting += [names[half:], names[:half]]
        return current

    def worth(self, name: str, how: Policy) -> float:
        """Seconds per byte that keeping a buffer saves."""
        buffer = self.keeping.buffers[name]
        seconds = buffer.again_s if isinstance(how, Recompute) else buffer.bytes / self.keeping.memory_bytes_per_s
        return seconds / max(buffer.bytes, 1)

    def polish(self, current: Assignment) -> Assignment:
        """Keep the most expensive thing anyway, and repair with others, as long as that makes it faster."""
        tabu: set[str] = set()
        while not self.ended():
            needed = self.keeping.resolved(current.policy)
            paid = [n for n, how in needed.items() if isinstance(how, Recompute) and n not in tabu]
            if not paid:
                break
            dearest = max(paid, key=lambda n: self.keeping.buffers[n].again_s)
            tabu.add(dearest)
            freed = {**current.policy, dearest: KEEP}
            repaired = self.give_up(self.assign(freed), most=8)
            if isinstance(repaired.policy.get(dearest), Keep) and repaired.fits(self.budget):
                repaired = self.take_back(repaired)
                if repaired.outcome.time_s < current.outcome.time_s:
                    current = repaired
        return current
