from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.pool import Pool, pool

SHARED = Path("/dev/shm")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Worker processes for the whole session; at its end no process, port or shared memory is left."""
    shared = set(SHARED.iterdir()) if SHARED.exists() else set()
    with pool() as made:
        port = made.port
        yield made
    assert not multiprocessing.active_children()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert not SHARED.exists() or not {p.name for p in set(SHARED.iterdir()) - shared if "torch" in p.name}
