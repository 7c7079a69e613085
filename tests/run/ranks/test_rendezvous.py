"""Ranks that a launcher started meet at one port, as often as they like."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outcore.errors import EngineError
from outcore.run.ranks import rendezvous
from outcore.run.ranks.rendezvous import LauncherEnvironment
from outcore.run.ranks.store import StoreServer, new_secret
from outcore.run.ranks.store_client import StoreClient

ROOT = Path(__file__).parents[3]
TWICE = """
import sys, time
from outcore.run.ranks.world import World
for turn in range(3):
    world = World.join(timeout_s=40.0)
    if world.rank == turn % 2:
        time.sleep(0.3)  # one rank after the other is late, also in leaving
    print(world.share([turn, world.rank]), flush=True)
    if world.rank == turn % 2:
        time.sleep(0.3)
    world.close()
"""


def test_ranks_of_one_launcher_meet_again_at_the_same_port() -> None:
    """As an engine after another does in the same processes under mpirun or SLURM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(2):
        env = os.environ | {
            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OUTCORE_SECRET": "0123456789abcdef" * 4,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        }  # fmt: skip
        words = [sys.executable, "-c", TWICE]
        started.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for process in started:
        said, _ = process.communicate(timeout=120.0)
        assert process.returncode == 0, said
        assert said.split("\n")[:3] == [str([[turn, 0], [turn, 1]]) for turn in range(3)]


FAILS = """
import os, sys, time
from outcore.errors import EngineError, OutcoreError
from outcore.run.ranks.rendezvous import say_that_it_failed
from outcore.run.ranks.world import World, identify
rank, failing = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(sys.argv[1])
began = time.monotonic()
try:
    if rank == failing:
        raise EngineError("no such table\\nwith a second line")
    time.sleep(3.0 if rank == 2 else 0.5)  # it plans; the last is late
    World.join(timeout_s=100.0)
except OutcoreError as error:
    say_that_it_failed(identify(os.environ), error, 100.0)
    print(error, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_before_it_has_met_the_others_tells_them(failing: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(3):
        env = os.environ | {
            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "3", "MASTER_PORT": str(port),
            "OUTCORE_SECRET": "0123456789abcdef" * 4, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        }  # fmt: skip
        words = [sys.executable, "-c", FAILS, str(failing)]
        started.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for rank, process in enumerate(started):
        said, _ = process.communicate(timeout=90.0)  # they would wait 100 s for each other
        assert process.returncode == 3, said
        expected = "no such table\nwith" if rank == failing else f"rank {failing} of 3 could not start: no such table\n"
        assert said.startswith(expected), said


@pytest.mark.parametrize("worlds", [1, 2])
def test_a_rank_that_waits_at_the_store_of_the_world_before_looks_for_the_next(
    worlds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a first world nothing can have been there before: a store that closes is then an error at once."""
    monkeypatch.setattr(rendezvous, "_joined", worlds)
    secret, rank = new_secret(), LauncherEnvironment("mpirun", 1, 2, 1, "127.0.0.1", 0)
    old = StoreServer(secret).start()
    with ThreadPoolExecutor() as pool:
        entering = pool.submit(rendezvous._enter, rank, secret, old.address, old.port, 20.0, "2/")
        while old.find("here/1") is None:
            time.sleep(0.01)
        old.close()  # the rank waits there for the first, which comes to the next
        new = StoreServer(secret, old.address, old.port).start()
        first = StoreClient(secret, new.address, new.port, timeout_s=20.0, prefix="2/")
        first.set("here/0", "")
        if worlds == 1:
            with pytest.raises(EngineError, match="could not reach the store"):
                entering.result()
        else:
            entering.result().close()
            assert first.check(["here/1"])
    first.close()
    new.close()


def test_a_store_that_is_taken_over_goes_on() -> None:
    secret = new_secret()
    server = StoreServer(secret).start()
    client = StoreClient(secret, server.address, server.port, timeout_s=20.0)
    client.set("a", "1")
    closing = threading.Thread(target=server.close, args=(20.0,))
    closing.start()  # waits, since somebody is connected
    assert server.take_over()
    client.close()
    closing.join(20.0)
    again = StoreClient(secret, server.address, server.port, timeout_s=20.0)
    assert again.get("a") == b"1"
    again.close()
    server.close()
    assert not server.take_over()
