"""What a container holds, noted before a run and put back after it.

A run of the user's code may exchange what lists, sets, deques and dictionaries hold. The container itself stays the one
that the rest of the program knows, and is filled again with the very objects of before.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

__all__ = ["CONTAINERS", "refill", "same_contents", "shallow_copy"]

CONTAINERS = (list, dict, set, deque)


def shallow_copy(container: Any) -> Any:
    """What a container holds, without running code of its class."""
    if isinstance(container, dict):
        return dict(dict.items(container))
    return set(container) if isinstance(container, set) else list(container)


def same_contents(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects of a shallow copy, in that order."""
    if len(container) != len(content):
        return False
    if isinstance(container, set):
        return {id(one) for one in container} == {id(one) for one in content}
    if isinstance(container, dict):
        pairs = zip(dict.items(container), content.items(), strict=True)
        return all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)
    return all(a is b for a, b in zip(container, content, strict=True))


def refill(container: Any, content: Any) -> None:
    """Make a container hold what a shallow copy of it says, by the methods that keep its order, not by its own."""
    if isinstance(container, dict):
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        for key, entry in content.items():
            kind.__setitem__(container, key, entry)
        return
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(content)
