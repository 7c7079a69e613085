"""The functions under ``functools.lru_cache`` in this process.

Python keeps no list of them; finding them means looking at every object there is, which takes a tenth of a second in a
process with a few large libraries. So they are remembered, weakly, and looked for again only when there are more: each
of them holds one reference to its type, so that the number of references to the type, less those of the known ones
alive, is the same until another is made (or somebody else refers to the type, and the search was for nothing).
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import Any

__all__ = ["function_caches"]

_Cache = functools._lru_cache_wrapper

_known: list[weakref.ref[_Cache[Any]]] = []
_others = -1
"""References to the type that no known cache holds."""


def function_caches() -> list[_Cache[Any]]:
    """All functions under ``functools.lru_cache``, but for torch's own."""
    global _known, _others
    alive = [cache for ref in _known if (cache := ref()) is not None]
    if not _is_counted() or sys.getrefcount(_Cache) - len(alive) != _others:
        alive = [o for o in gc.get_referrers(_Cache) if type(o) is _Cache]
        _known = [weakref.ref(cache) for cache in alive]
        _others = sys.getrefcount(_Cache) - len(alive)
    return [cache for cache in alive if not str(getattr(cache, "__module__", "")).startswith("torch.")]


def _is_counted() -> bool:
    """Whether a cache adds to the references of its type: not so in a Python without a global lock."""
    before = sys.getrefcount(_Cache)
    cache = functools.lru_cache(_is_counted)
    return sys.getrefcount(_Cache) - before == 1 and cache is not None
