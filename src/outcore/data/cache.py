"""The cache of open files and decoded tiles: bounded, shared by all slides of a process, thread-safe.

Neighbouring regions share tiles, and the second pass of a step reads what the first has read, so decoded tiles are
worth keeping; a data set of a thousand slides must neither keep a thousand files open nor all their tiles. Two least
recently used lists bound both. A file that falls out of the list is closed when its last reader releases it, so a read
never finds its file closed.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import numpy as np

Handle = TypeVar("Handle")
Pixels = np.ndarray[Any, Any]


class TileCache:
    """Decoded tiles, the least recently used forgotten when they exceed a number of bytes.

    >>> cache = TileCache(limit_bytes=100)
    >>> cache.put("a", np.zeros(80, np.uint8)), cache.put("b", np.zeros(60, np.uint8))
    (None, None)
    >>> cache.get("a") is None, cache.held_bytes
    (True, 60)
    """

    def __init__(self, limit_bytes: int = 256 << 20) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = self.hits = self.misses = 0
        self._tiles: OrderedDict[Hashable, Pixels] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tiles)

    def get(self, key: Hashable) -> Pixels | None:
        """A tile, or None."""
        with self._lock:
            tile = self._tiles.get(key)
            if tile is None:
                self.misses += 1
            else:
                self.hits += 1
                self._tiles.move_to_end(key)
            return tile

    def put(self, key: Hashable, tile: Pixels) -> None:
        """Keep a tile, and forget the oldest until all fit; one larger than the limit is not kept."""
        if tile.nbytes > self.limit_bytes:
            return
        with self._lock:
            old = self._tiles.pop(key, None)
            self._tiles[key] = tile
            self.held_bytes += tile.nbytes - (0 if old is None else old.nbytes)
            while self.held_bytes > self.limit_bytes:
                self.held_bytes -= self._tiles.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._tiles.clear()
            self.held_bytes = 0


class Handles(Generic[Handle]):
    """Open files, by key: opened when first asked for, at most `limit` of them kept.

    A forked process begins with none: two processes must not share a file position.
    """

    def __init__(self, limit: int = 32) -> None:
        self.limit = limit
        self._open: OrderedDict[Hashable, Handle] = OrderedDict()
        self._dropped: deque[Hashable] = deque()
        self._lock = threading.RLock()
        self._process = os.getpid()

    def get(self, key: Hashable, opened: Callable[[], Handle]) -> Handle:
        """The open file of a key."""
        if self._process != os.getpid():
            self._open, self._lock, self._process = OrderedDict(), threading.RLock(), os.getpid()
        with self._lock:
            self._forget()
            handle = self._open.get(key)
            if handle is None:
                handle = self._open[key] = opened()
            self._open.move_to_end(key)
            while len(self._open) > self.limit:
                self._open.popitem(last=False)
            return handle

    def drop(self, key: Hashable) -> None:
        """Release a file; it is closed when no read uses it any more. Never waits.

        The interpreter frees slides in whatever thread it happens to be in. That may be the one which the thread that
        holds the lock waits for, because it opens a file with it.
        """
        self._dropped.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._forget()
            finally:
                self._lock.release()

    def _forget(self) -> None:
        while self._dropped:
            self._open.pop(self._dropped.popleft(), None)


tile_cache = TileCache()
"""The tiles of this process; set its ``limit_bytes`` to bound it otherwise."""

handles: Handles[Any] = Handles()
"""The open files of this process."""
