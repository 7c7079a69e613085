"""Plans, kept on disk and in memory, so that the second start of a training does not search again.

What a plan depends on is the key: the costs of the network's calls (in which the network, every shape, the device and
the versions are, and which are kept themselves, `outcore.cost.cost_cache`) and what was asked for. A plan from a file
is evaluated like one chosen by hand; where it does not fit the network or the budget as they are now (a layer with
hooks, less free memory on the host), there is a new search. So a wrong file costs time and nothing else.

Two more facts are kept in the same way: how much of a budget the allocator took for itself when the step was tried on
the device, so that the step need not be tried again; and the policies of the smallest budget that a refusal has named,
because that budget has to do when it is given.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict
from typing import Any

from outcore.cost.cost_cache import cache_folder
from outcore.cost.costs import Costs
from outcore.documents.reading import write_text
from outcore.errors import OutcoreError
from outcore.memory.saved_tensors.settings import Settings
from outcore.planner.memory.plan import MemoryPlan
from outcore.planner.memory.state_policy import StatePolicy
from outcore.program.policies import Policies, Policy, parse_policies, policies_to_json

_FORMAT = 1
_MOST = 64
_KNOWN: dict[str, dict[str, Any]] = {}


def known_policy(costs: Costs, settings: Settings) -> tuple[dict[str, Policy], StatePolicy] | None:
    """The policies of values and state that were found before, if they were."""
    found = _read(_key("plan", costs, settings))
    if found is None:
        return None
    with contextlib.suppress(Exception):
        state = StatePolicy.of(found["state"])
        if state in settings.states:
            return _policy(found["policy"]), state
    return None


def remember_plan(costs: Costs, settings: Settings, plan: MemoryPlan) -> None:
    """Keep a plan that was found."""
    _write(
        _key("plan", costs, settings), {"policy": policies_to_json(plan.assignment.policy), "state": asdict(plan.state)}
    )


def known_overhead(costs: Costs, settings: Settings, *, limited: bool) -> tuple[int, int] | None:
    """Bytes to leave free beside what was asked for, with which the step was seen to stay within its budget, and which
    of `settings.states` it had; under a limit of the process, which has to be larger, other than without."""
    found = _read(_key("limited overhead" if limited else "overhead", costs, settings)) or {}
    size, rung = found.get("bytes"), found.get("rung", 0)
    return (size, rung) if isinstance(size, int) and size >= 0 and isinstance(rung, int) and rung >= 0 else None


def remember_overhead(costs: Costs, settings: Settings, size: int, rung: int, *, limited: bool) -> None:
    """Keep what had to be left free for a step to stay within its budget."""
    _write(_key("limited overhead" if limited else "overhead", costs, settings), {"bytes": size, "rung": rung})


def known_least(costs: Costs, *, draws: bool) -> dict[str, Policy] | None:
    """The policies of the smallest budget that was named for a network."""
    found = _read(_key("least", costs, draws))
    with contextlib.suppress(Exception):
        return _policy(found["policy"]) if found is not None else None
    return None


def remember_least(costs: Costs, policy: Policies, *, draws: bool) -> None:
    """Keep the policies of the smallest budget that was named."""
    _write(_key("least", costs, draws), {"policy": policies_to_json(policy)})


def _policy(given: Any) -> dict[str, Policy]:
    found = dict(given)
    if not all(isinstance(name, str) and isinstance(how, str) for name, how in found.items()):
        raise TypeError("policies are names")
    return parse_policies(found)


def _key(kind: str, costs: Costs, asked: Settings | bool) -> str | None:
    """A hash of what a fact depends on; none where nothing is kept."""
    if cache_folder() is None:
        return None
    from outcore import __version__

    facts: list[Any] = [_FORMAT, kind, __version__, _digest(costs)]
    if isinstance(asked, Settings):
        facts += [asked.budget_bytes, asdict(asked.optimizer), asked.reserved_bytes, asked.graphs, asked.beside_bytes]
        facts += [asked.reassociated, asked.fuse, asked.margin, asked.rounding_bytes, asked.search_s]
        facts += [[asdict(state) for state in asked.states]]
    else:
        facts += [asked]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]


def _digest(costs: Costs) -> str:
    """A hash of costs."""
    return hashlib.sha256(json.dumps(costs.to_json(), default=str).encode()).hexdigest()


def _read(key: str | None) -> dict[str, Any] | None:
    folder = cache_folder()
    if key is None or folder is None:
        return None
    if key not in _KNOWN:
        try:
            found = json.loads((folder.parent / "plans" / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict):
            return None
        _keep(key, found)
    return _KNOWN[key]


def _write(key: str | None, facts: dict[str, Any]) -> None:
    """Keep facts in a file, if that can be."""
    folder = cache_folder()
    if key is None or folder is None:
        return
    _keep(key, facts)
    plans = folder.parent / "plans"
    with contextlib.suppress(OSError, OutcoreError):
        plans.mkdir(parents=True, exist_ok=True)
        write_text(plans / f"{key}.json", json.dumps(facts))


def _keep(key: str, facts: dict[str, Any]) -> None:
    _KNOWN[key] = facts
    while len(_KNOWN) > _MOST:
        _KNOWN.pop(next(iter(_KNOWN)))
