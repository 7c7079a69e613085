"""Functions under ``functools.lru_cache`` are found, also those made later, and the search is not repeated."""

import functools
import gc
import sys
import weakref

import pytest

from outcore.graph.record import preserve as module
from outcore.graph.record.preserve import function_caches


@functools.lru_cache
def at_the_top(x: int) -> int:
    return x


def made() -> "functools._lru_cache_wrapper[int]":
    return functools.lru_cache(maxsize=4)(lambda x: x)


def is_found(cache: object) -> bool:
    return any(found is cache for found in function_caches())


def test_all_are_found_wherever_they_are() -> None:
    class Holder:
        @functools.cache  # noqa: B019
        def method(self) -> int:
            return 1

    assert is_found(at_the_top) and is_found(Holder.__dict__["method"])


def test_one_that_is_made_later_is_found() -> None:
    function_caches()
    later = made()
    assert is_found(later)


def test_one_made_in_place_of_another_is_found() -> None:
    for _ in range(3):
        first = made()
        assert is_found(first)
        del first
        gc.collect()
        second = made()
        assert is_found(second)


def test_they_are_not_kept_alive() -> None:
    some = [made() for _ in range(5)]
    assert all(map(is_found, some))
    refs = [weakref.ref(cache) for cache in some]
    some.clear()
    assert [ref() for ref in refs] == [None] * 5


def test_torchs_own_are_left_out() -> None:
    assert not any(str(f.__module__).startswith("torch.") for f in function_caches())


def test_nothing_is_searched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[object] = []

    class Counted:
        @staticmethod
        def get_referrers(kind: object) -> list[object]:
            searches.append(kind)
            return gc.get_referrers(kind)

    function_caches()
    monkeypatch.setattr(module, "gc", Counted)
    for _ in range(3):
        function_caches()
    assert not searches
    one_more = made()
    assert is_found(one_more) and len(searches) == 1


def test_where_references_are_not_counted_every_call_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uncounted:
        @staticmethod
        def getrefcount(_: object) -> int:
            return 2**31

    function_caches()
    monkeypatch.setattr(module, "sys", Uncounted)
    unseen = made()
    assert is_found(unseen) and sys.getrefcount(unseen) > 0
