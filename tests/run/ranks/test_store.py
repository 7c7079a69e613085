"""The store where ranks meet: who may enter, what a stranger can do, and what happens when it does not answer."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from outcore.errors import EngineError
from outcore.run.ranks.launch import launch
from outcore.run.ranks.rendezvous import find_secret
from outcore.run.ranks.store import StoreServer, new_secret
from outcore.run.ranks.store_client import StoreClient
from tests.foreign.sample import sometimes


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer("right" * 8).start()
    yield made
    made.close()


def enter(server: StoreServer, secret: str = "right" * 8) -> StoreClient:
    return StoreClient(secret, server.address, server.port, timeout_s=5.0)


def test_it_listens_on_loopback_alone(server: StoreServer) -> None:
    assert server.address == "127.0.0.1"
    others = {row[4][0] for row in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with socket.socket() as line:
            line.settimeout(2)
            assert line.connect_ex((address, server.port)) != 0


def test_it_does_what_torch_asks_of_a_store(server: StoreServer) -> None:
    one, two = enter(server), enter(server)
    one.set("a", b"\x00\xff")
    assert two.get("a") == b"\x00\xff" and two.check(["a"]) and not two.check(["a", "b"])
    assert (one.add("n", 2), two.add("n", 3), two.num_keys()) == (2, 5, 2)
    assert one.compare_set("c", "", "first") == b"first" and two.compare_set("c", "", "second") == b"first"
    assert two.compare_set("c", "first", "third") == b"third" and two.compare_set("d", "x", "y") == b""
    assert two.delete_key("a") and not two.delete_key("a")
    threading.Timer(0.2, one.set, ("late", b"1")).start()
    two.wait(["late"], timedelta(seconds=5))
    with pytest.raises(dist.DistStoreError, match="never did not come within 0 s"):
        two.wait(["never"], timedelta(seconds=0.1))
    one.close(), two.close()


def test_who_does_not_know_the_secret_is_refused(server: StoreServer, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with pytest.raises(EngineError, match="does not know this run's secret; start all ranks with the same"):
            enter(server, "wrong" * 8)
    while server.refused < 2:
        time.sleep(0.01)
    assert capfd.readouterr().err.count("did not know this run's secret") == 1


@pytest.mark.parametrize(
    "said", [b"", b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n" * 8, b"\xff" * 100_000, pickle.dumps([1])]
)
def test_a_stranger_on_the_port_disturbs_nobody(server: StoreServer, said: bytes) -> None:
    client = enter(server)
    with socket.create_connection((server.address, server.port)) as stranger:
        stranger.sendall(said)
        client.set("key", "value")
        assert client.get("key") == b"value"
    client.close()


def test_sizes_from_the_wire_are_not_believed(server: StoreServer) -> None:
    client = enter(server)
    assert client._line is not None
    client._line.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ConnectionError, match="does not answer"):
        client.set("a", "b")
    client.set("a", "b")  # on a new connection
    with pytest.raises(ConnectionError, match="at most 4,194,304"):
        client.set("a", bytes(5 << 20))
    client.close()


def test_waits_end_when_a_rank_will_not_come(server: StoreServer) -> None:
    client = enter(server)
    threading.Timer(0.1, server.fail, ("rank 3 was killed",)).start()
    with pytest.raises(EngineError, match="rank 3 was killed"):
        client.get("of rank 3")
    client.close()


def stop(process: subprocess.Popen[str]) -> None:
    """Stop all threads of a process, and return when they are."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_a_stopped_server_is_an_error_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.run.ranks.store_client.SILENT_S", 0.5)
    program = "import sys, time\nfrom outcore.run.ranks.store import StoreServer\n"
    program += "print(StoreServer('right' * 8).start().port, flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        client = StoreClient("right" * 8, "127.0.0.1", int(process.stdout.readline()), timeout_s=10.0)
        client.set("a", "b")
        stop(process)
        with pytest.raises(ConnectionError, match="does not answer"):
            client.check(["a"])
        process.send_signal(signal.SIGCONT)
        assert client.get("a") == b"b"
        client.close()
        stop(process)
        with pytest.raises(ConnectionError, match="no store at"):  # what a rank meets whose launcher was stopped
            StoreClient("right" * 8, "127.0.0.1", client.port, timeout_s=600.0, is_there=True)
    finally:
        process.kill()
        process.communicate()


def test_the_secret_of_a_user_is_made_once_and_readable_by_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTCORE_SECRET", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = find_secret()
    assert found == find_secret() and len(found) == 64 and found != new_secret()
    path = tmp_path / "outcore" / "secret"
    assert path.stat().st_mode & 0o777 == 0o600 and [p.name for p in path.parent.iterdir()] == ["secret"]
    path.chmod(0o644)
    with pytest.raises(EngineError, match="is no secret"):
        find_secret()
    monkeypatch.setenv("OUTCORE_SECRET", "told")
    assert find_secret() == "told"


def ports_and_parent() -> tuple[list[str], int, str]:
    from outcore.run.ranks.world import World

    world = World.join(timeout_s=30.0)
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in map(str, _sockets()):
                listening.append(local.partition(":")[0])
    world.close()
    return listening, os.getppid(), os.environ["GLOO_SOCKET_IFNAME"]


def _sockets() -> list[Path]:
    return [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def test_launching_leaves_signal_handlers_alone_and_nothing_listens_outside() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    for listening, parent, interface in launch(ports_and_parent, 2):
        assert parent == os.getpid() and interface == "lo"
        assert set(listening) <= {"0100007F", "00000000000000000000000001000000"}
    assert [signal.getsignal(number) for number in numbers] == before
    assert "RANK" not in os.environ and "OUTCORE_SECRET" not in os.environ


def die_while_starting(rank: int) -> None:
    from outcore.run.ranks.world import World

    if os.environ["RANK"] == str(rank):
        os.kill(os.getpid(), signal.SIGKILL)
    World.join(timeout_s=100.0).close()


@sometimes
def test_a_rank_killed_while_starting_is_named_and_nobody_waits_for_it() -> None:
    with pytest.raises(EngineError, match="rank 1 failed: SIGKILL while starting"):
        launch(die_while_starting, 2, 1)


def write_pid_and_wait(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(120)


@sometimes
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    program = "from outcore.run.ranks.launch import launch\nfrom tests.run.ranks.test_store import write_pid_and_wait\n"
    program += f"if __name__ == '__main__':\n    launch(write_pid_and_wait, 2, {str(tmp_path)!r})"
    script = tmp_path / "launching.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", str(Path(__file__).parents[3]), *sys.path])}
    launcher = subprocess.Popen([sys.executable, str(script)], env=environment)
    while len([p for p in tmp_path.glob("[01]") if p.read_text()]) < 2:
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    for rank in "01":
        status = Path("/proc", (tmp_path / rank).read_text(), "stat")
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.05)
