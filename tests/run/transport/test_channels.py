"""Channels between ranks, over pipes and over sockets: order, full ones, several readers, and ends that are gone."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outcore.run.transport import channels
from outcore.run.transport.channels import MOST_BYTES, Channels
from outcore.run.transport.pipes import OutgoingPipe, incoming_pipe
from outcore.run.transport.sockets import channels_of

Ends = tuple[Channels, Channels]


def nothing() -> None:
    """All is well."""


@pytest.fixture(params=["pipes", "sockets"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Two ranks in one process, each with a channel to the other."""
    if request.param == "pipes":
        away, back = OutgoingPipe(), OutgoingPipe()
        there = incoming_pipe(os.getpid(), away.reading), incoming_pipe(os.getpid(), back.reading)
        away.handed_over()
        back.handed_over()
        first, second = Channels({1: away}, {1: there[1]}), Channels({0: back}, {0: there[0]})
    else:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            one = socket.create_connection(listening.getsockname())
            other, _ = listening.accept()
        first, second = Channels({}, {}), Channels({}, {})
        first.add(1, *channels_of(one))
        second.add(0, *channels_of(other))
    yield first, second
    first.close()
    second.close()


def test_messages_of_a_tag_arrive_in_order_whatever_lies_between(ends: Ends) -> None:
    first, second = ends
    for number in range(5):
        first.send(1, number % 2, bytes([number]))
    first.send(1, 7, b"")
    first.send(1, 8, bytes(MOST_BYTES))
    assert second.receive(0, 8, nothing) == bytes(MOST_BYTES)
    assert [second.receive(0, 1, nothing) for _ in range(2)] == [b"\1", b"\3"]
    assert [second.receive(0, 0, nothing) for _ in range(3)] == [b"\0", b"\2", b"\4"]
    assert second.receive(0, 7, nothing) == b""


def test_what_is_left_is_written_whatever_the_sender_waits_for(ends: Ends) -> None:
    """The sender may be in a collective of gloo, which the receiver comes to when it has the whole message."""
    first, second = ends
    count = 64
    for number in range(count):
        first.send(1, 3, bytes([number]) * MOST_BYTES)
    found: list[bytes] = []
    reader = threading.Thread(
        target=lambda: found.extend(second.receive(0, 3, nothing) for _ in range(count)), daemon=True
    )
    reader.start()
    reader.join(60)  # and the sender does nothing else
    assert [row[0] for row in found] == list(range(count)) and all(len(row) == MOST_BYTES for row in found)


def test_a_sender_that_closes_with_something_left_ends_its_thread(ends: Ends) -> None:
    first, _ = ends
    for _ in range(64):
        first.send(1, 3, bytes(MOST_BYTES))
    assert any(thread.name == "outcore write" for thread in threading.enumerate())
    first.close()
    assert all(thread.name != "outcore write" for thread in threading.enumerate())


def test_more_than_a_pipe_holds_waits_in_the_sender_and_arrives(ends: Ends) -> None:
    first, second = ends
    count = 16 * (1 << 18) // 500
    for number in range(count):
        first.send(1, number, number.to_bytes(500, "little"))
    assert not first.flush()
    with ThreadPoolExecutor(1) as pool:
        finished = pool.submit(first.finish, nothing)
        found = [int.from_bytes(second.receive(0, number, nothing), "little") for number in reversed(range(count))]
        finished.result(10.0)
    assert found == list(reversed(range(count)))
    assert first.flush()


def test_two_that_have_filled_both_pipes_do_not_wait_for_each_other(ends: Ends) -> None:
    count = 1600

    def one(mine: Channels, other: int) -> int:
        for number in range(count):
            mine.send(other, number, bytes(500))
        found = sum(len(mine.receive(other, number, nothing)) for number in range(count))
        mine.finish(nothing)
        return found

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(one, ends[0], 1), pool.submit(one, ends[1], 0)]
        assert [r.result(20.0) for r in results] == [count * 500] * 2


def test_threads_that_wait_for_different_tags_get_theirs(ends: Ends) -> None:
    first, second = ends
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(second.receive, 0, tag, nothing) for tag in range(4)]
        for tag in reversed(range(4)):
            first.send(1, tag, bytes([tag]))
        assert [w.result(10.0) for w in waiting] == [bytes([tag]) for tag in range(4)]


def test_what_was_sent_before_the_end_still_arrives_then_the_wait_ends(ends: Ends) -> None:
    first, second = ends
    first.send(1, 3, b"last")
    first.close()
    assert second.receive(0, 3, nothing) == b"last"
    with pytest.raises(ConnectionError, match="rank 0 has closed its connection"):
        second.receive(0, 4, nothing)


def test_a_rank_that_does_not_read_any_more_is_said(ends: Ends) -> None:
    first, second = ends
    second.close()
    with pytest.raises(ConnectionError, match="rank 1 does not read"):
        for _ in range(100):  # a socket takes one before the other end's answer comes
            first.send(1, 0, b"x")
            time.sleep(0.01)


def test_a_wait_looks_up_and_ends_with_what_that_raises(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "LOOK_S", 0.01)

    def look() -> None:
        raise ConnectionError("another rank has failed")

    with pytest.raises(ConnectionError, match="another rank has failed"):
        ends[1].receive(0, 0, look)
    with pytest.raises(ConnectionError, match="another rank has failed"):
        for _ in range(4000):
            ends[0].send(1, 0, bytes(500))
        ends[0].finish(look)


def test_closing_ends_the_own_wait(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "LOOK_S", 0.05)
    begun = threading.Event()

    def wait() -> bytes:
        begun.set()
        return ends[1].receive(0, 0, nothing)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert begun.wait(10.0)
        ends[1].close()
        with pytest.raises((ConnectionError, KeyError)):
            waiting.result(10.0)


def test_something_that_is_no_pipe_is_refused() -> None:
    with Path(os.devnull).open() as other, pytest.raises(OSError, match="not a pipe"):
        incoming_pipe(os.getpid(), other.fileno())
