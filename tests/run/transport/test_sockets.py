"""Sockets between ranks of several hosts: who is let in, where is listened, and what goes through them."""

from __future__ import annotations

import contextlib
import secrets
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outcore.run.ranks.store import enter
from outcore.run.ranks.world import World
from outcore.run.transport import sockets
from outcore.run.transport.all_reduce import DirectAllReduce
from outcore.run.transport.channels import MOST_BYTES
from outcore.run.transport.p2p import TensorLayout
from outcore.run.transport.shared_memory import SharedRows
from outcore.run.transport.sockets import _Listener
from tests.run.pool import Pool
from tests.run.training import train

SECRET, TOKEN = "0123456789abcdef" * 4, secrets.token_bytes(16)


def _line(listener: _Listener) -> socket.socket:
    return socket.create_connection(tuple(listener.address), timeout=5.0)


def test_strangers_are_cut_off_and_take_nobodys_place() -> None:
    listener = _Listener.at("127.0.0.1")
    assert listener is not None
    listener.start(SECRET, TOKEN)
    held = [_line(listener) for _ in range(3)]  # they say nothing
    with _line(listener) as garbage:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert garbage.recv(32)
        with contextlib.suppress(ConnectionResetError):
            while garbage.recv(64):
                pass
    with _line(listener) as wrong:
        assert not enter(wrong, b"another secret", sockets._PURPOSE)
    with _line(listener) as of_the_store:  # it knows the secret, and meant to reach the store
        assert not enter(of_the_store, SECRET.encode())
    answers = []
    for token in (secrets.token_bytes(16), TOKEN, TOKEN):  # of another meeting, the right one, the same rank again
        held.append(_line(listener))
        assert enter(held[-1], SECRET.encode(), sockets._PURPOSE)
        held[-1].sendall(token + sockets._WHO.pack(3))
        answers.append(_answer(held[-1]))
    assert answers == [b"", b"=", b""]
    came = listener.close()
    assert set(came) == {3}
    for line in (*held, *came.values()):
        line.close()
    with pytest.raises(OSError):
        _line(listener)


def _answer(line: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        return line.recv(1)
    return b""


def test_an_address_that_is_not_this_hosts_is_not_listened_on() -> None:
    assert _Listener.at("203.0.113.1") is None


def test_the_interface_that_is_named_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = SimpleNamespace(meeting=SimpleNamespace(store=SimpleNamespace(own_address="10.9.8.7")))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert sockets.own_address(world) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert sockets.own_address(world) == "10.9.8.7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert sockets.own_address(world) == "10.9.8.7"


def _apart(function: Any, *args: Any) -> Any:
    """With ranks that do not see each other's memory, as on several hosts."""
    meet = SharedRows._meet

    def alone(self: SharedRows, world: World) -> Any:
        pids, pipes, _ = meet(self, world)
        pipes.close()
        self._table = [[False] * world.size for _ in range(world.size)]
        return pids, pipes, frozenset()

    SharedRows._meet = alone  # type: ignore[method-assign]
    try:
        return function(*args)
    finally:
        SharedRows._meet = meet  # type: ignore[method-assign]


def _exchange() -> dict[str, Any]:
    world = World.join(timeout_s=20.0)
    rows = SharedRows(world, torch.device("cpu"))
    ranks = sorted(rows.socket_ranks)
    sizes = [
        rows.carries(ranks[0], MOST_BYTES),
        rows.carries(ranks[0], MOST_BYTES + 1),
        rows.connect([0, 1, 2], 1 << 20),
        rows.connect([0, 1, 2], 1 << 21),
    ]
    for other in ranks:
        row = torch.full((MOST_BYTES // 4,), 10.0 * world.rank + other)
        rows.send(row, TensorLayout((len(row),), (1,), row.dtype), other, 5)
    got = [float(rows.receive(other, 5, MOST_BYTES).view(torch.float32).unique()) for other in ranks]
    rows.finish()
    world.barrier()
    rows.close()
    world.close()
    return {"ranks": ranks, "sizes": sizes, "got": got}


def test_ranks_that_share_no_memory_have_sockets(ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(_apart, 3, _exchange)):
        others = [other for other in range(3) if other != rank]
        assert found["ranks"] == others and found["sizes"] == [True, False, True, False]
        assert found["got"] == [10.0 * other + rank for other in others]


def _blocked(function: Any, *args: Any) -> Any:
    """Nobody can connect, as behind a firewall."""
    connected = sockets._connected

    def refused(*given: Any) -> Any:
        raise ConnectionRefusedError

    sockets._connected = refused
    try:
        return _apart(function, *args)
    finally:
        sockets._connected = connected


PLANS = [
    {"stages": 2, "schedule": "1f1b", "micro_batches": 4},
    {"stages": 1, "spatial": {"grid": [1, 2]}, "exactness": "reassociated"},
]


@pytest.mark.parametrize("plan", PLANS, ids=["stages", "grid"])
def test_sockets_and_gloo_carry_the_same(ranks: Pool, plan: dict[str, Any]) -> None:
    ours, theirs = (ranks.run(way, 2, train, "unet", plan) for way in (_apart, _blocked))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["losses"] == other["losses"]
        assert all(torch.equal(t, other["weights"][n]) for n, t in mine["weights"].items())


def _add_up(count: int) -> torch.Tensor:
    world = World.join(timeout_s=20.0)
    rows = SharedRows(world, torch.device("cpu"))
    row = torch.randn(count, generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64)
    assert rows.connect(range(world.size), row.nbytes)
    total = DirectAllReduce(row, world.rank, range(world.size), 7, rows)
    total.add()
    total.wait()
    rows.finish()
    world.barrier()
    rows.close()
    world.close()
    return row


@pytest.mark.parametrize(("size", "count"), [(2, 1), (2, 130_000), (3, 2), (4, 130_000)])
def test_rows_are_added_up_through_sockets(ranks: Pool, size: int, count: int) -> None:
    found = ranks.run(_apart, size, _add_up, count)
    assert all(torch.equal(row, found[0]) for row in found)
    drawn = [torch.Generator().manual_seed(rank) for rank in range(size)]
    oracle = torch.stack([torch.randn(count, generator=g, dtype=torch.float64) for g in drawn]).sum(0)
    assert torch.allclose(found[0], oracle, rtol=0.0, atol=1e-12)
