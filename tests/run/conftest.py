from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.run.pool import Pool, pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Worker processes for the whole session."""
    with pool() as made:
        yield made
