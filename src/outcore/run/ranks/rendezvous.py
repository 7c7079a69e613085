"""How the ranks of a run find each other: who runs the store, at which address, and who may connect.

| started by | run by | at |
|---|---|---|
| `outcore train --ranks`, `outcore.run.ranks.launch` | the launcher | loopback |
| torchrun | rank 0, which sends it through torchrun's own store | loopback, or MASTER_ADDR over several hosts |
| SLURM, mpirun | rank 0 | MASTER_ADDR:MASTER_PORT; loopback on one host |
| a process group of the user's | rank 0, which sends the address through the group | loopback, or its host's address |

What is sent through a store of torch's is an address and nothing more: whoever answers there still has to prove that it
knows the secret (`outcore.run.ranks.store`).

Who knows the secret of a run may join, nobody else. A launcher of outcore's own makes one for each run and gives it to
its ranks in their environment, which only their user can read. Ranks that something else started (torchrun, SLURM,
mpirun) look for ``OUTCORE_SECRET`` too; where it is not set they use a file of the user's own, made with the first run,
which clusters share between hosts with the home directory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from outcore.errors import EngineError, OutcoreError
from outcore.run.ranks.store import StoreServer, new_secret
from outcore.run.ranks.store_client import StoreClient

if TYPE_CHECKING:
    from outcore.run.ranks.world import World

ADDRESS = "OUTCORE_STORE"
"""The variable in which outcore's launcher gives its ranks the address of the store."""
_LOOPBACK = "127.0.0.1"
_LINGER_S = 5.0
"""Seconds that the rank that runs the store stays for the others to read why it failed, or to leave too."""

_joined = 0
_AGAIN_S = 0.05
_leaving: list[StoreServer] = []
"""Stores that this process has left and that may still answer others."""


@dataclass(frozen=True, slots=True)
class LauncherEnvironment:
    """The rank, size and address that a launcher set in environment variables."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    address: str
    port: int


@dataclass(slots=True, eq=False)
class Rendezvous:
    """A rank's connection to the store, and the store itself on the rank that runs it."""

    store: StoreClient
    server: StoreServer | None = None
    store_rank: int | None = 0
    """The rank that runs the store; None where the launcher does."""

    worlds: int = 0
    """Further worlds that were made through this one."""

    def beside(self) -> Rendezvous:
        """A connection of its own for another world of the same ranks; all ranks make them in the same order."""
        self.worlds += 1
        return Rendezvous(self.store.another(f"world{self.worlds}/"), store_rank=self.store_rank)

    def leave(self, *, failed: bool = False) -> None:
        """Disconnect. A failed rank waits until the others know; one that is done does not delay its caller."""
        self.store.close()
        server, self.server = self.server, None
        if server is None:
            return
        if failed:
            server.close(_LINGER_S)
        else:
            _leaving.append(server)
            threading.Thread(target=server.close, args=(_LINGER_S,), name="outcore store", daemon=True).start()


def say_that_it_failed(identity: LauncherEnvironment, error: Exception, timeout_s: float) -> None:
    """Tell the other ranks why this one will not come, in a thread: the others would wait for it.

    Does nothing if this rank has met the others already: from then on, they watch each other. The process ends when all
    of them know, or after `timeout_s`.
    """
    if _joined:
        return

    def tell() -> None:
        with contextlib.suppress(OutcoreError, ConnectionError, OSError):
            meet(identity, timeout_s, failure=said).leave(failed=True)

    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    threading.Thread(target=tell, name="outcore failed").start()


def meet(identity: LauncherEnvironment, timeout_s: float, *, failure: str = "") -> Rendezvous:
    """Rendezvous with the other ranks that a launcher started; `failure` is why this one will do nothing more."""
    global _joined
    _joined += 1  # all ranks join as often, so a second world does not find the addresses of the first
    prefix = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_joined}/"
    secret = find_secret()
    if given := os.environ.get(ADDRESS):
        address, _, port = given.rpartition(":")
        there = _enter(identity, secret, address, int(port), timeout_s, prefix, True, failure)
        return Rendezvous(there, store_rank=None)
    server = None
    address, number = identity.address, identity.port
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(identity.size)
        server, address, number = _through_agent(
            identity, secret, _LOOPBACK if one_host else address, timeout_s, prefix
        )
    elif identity.rank == 0:
        server = _still_there(address, number) or _serve(secret, address, number)
    try:
        return Rendezvous(_enter(identity, secret, address, number, timeout_s, prefix, False, failure), server)
    except BaseException:
        if server is not None:  # others may still have to read there why this run does not begin
            server.close(_LINGER_S)
        raise


def _still_there(address: str, port: int) -> StoreServer | None:
    """The store of the world before, at the same port, where other ranks may already be looking for the next one."""
    left, _leaving[:] = list(_leaving), []
    for server in left:
        if (server.address, server.port) == (socket.gethostbyname(address), port):
            if server.take_over():
                return server
            server.close()  # at once, so that the port is free
    return None


def _wait_for_all(
    identity: LauncherEnvironment, store: StoreClient, timeout_s: float, failure: str, runs_store: bool
) -> None:
    """Wait until every rank is here; raises naming one that is not, or that came to say why it failed.

    The rank that runs the store hears of a failure only when all are here: the later ones read it in its store.
    """
    store.set(f"here/{identity.rank}", failure)
    deadline = time.monotonic() + timeout_s
    said = ""
    for rank in range(identity.size):
        try:
            store.wait([f"here/{rank}"], timedelta(seconds=max(1.0, deadline - time.monotonic())))
        except dist.DistStoreError:
            raise EngineError(
                said
                or f"rank {rank} of {identity.size} has not come within {timeout_s:.0f} s; was it started, and does it "
                "still run?"
            ) from None
        if not failure and not said and (why := store.get(f"here/{rank}").decode()):
            said = f"rank {rank} of {identity.size} could not start: {why}"
            if not runs_store:
                break
    if said:
        raise EngineError(said)


def meet_over(world: World, timeout_s: float) -> Rendezvous:
    """Rendezvous over an existing process group; collective."""
    hosts = world.share(_network())
    server, given = None, None
    if world.rank == 0:
        address = _LOOPBACK if len(set(hosts)) == 1 else socket.gethostbyname(socket.gethostname())
        secret = new_secret()
        server = _serve(secret, address, 0)
        given = [server.address, server.port, secret]
    address, port, secret = world.share(given)[0]
    return Rendezvous(StoreClient(secret, address, port, timeout_s=timeout_s), server)


def _through_agent(
    identity: LauncherEnvironment, secret: str, address: str, timeout_s: float, prefix: str
) -> tuple[StoreServer | None, str, int]:
    """Rank 0 runs the store at a free port and sends its address through the store of torchrun's agent."""
    key = f"outcore/{prefix}address"
    try:
        agent: Any = dist.TCPStore(  # type: ignore[attr-defined]
            identity.address, identity.port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )
        if identity.rank == 0:
            server = _serve(secret, address, 0)
            agent.set(key, f"{server.address}:{server.port}")
            return server, server.address, server.port
        given, _, port = agent.get(key).decode().rpartition(":")
        return None, given, int(port)
    except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:
        raise _unreachable(identity, identity.address, identity.port, error) from error


def _serve(secret: str, address: str, port: int) -> StoreServer:
    try:
        return StoreServer(secret, address, port).start()
    except OSError as error:
        raise EngineError(
            f"port {port} of {address} on {socket.gethostname()} cannot be used ({error.strerror}); set MASTER_PORT to "
            "a free one, and MASTER_ADDR to an address of the host of rank 0"
        ) from error


def _enter(
    identity: LauncherEnvironment,
    secret: str,
    address: str,
    port: int,
    timeout_s: float,
    prefix: str,
    is_there: bool = False,
    failure: str = "",
) -> StoreClient:
    """The store, when all ranks are there. One that breaks off meanwhile may be that of the world before, on its way
    out: then the next one is looked for."""
    deadline = time.monotonic() + timeout_s
    runs_store = identity.rank == 0 and not is_there
    while True:
        left = max(1.0, deadline - time.monotonic())
        store = None
        try:
            store = StoreClient(secret, address, port, timeout_s=left, is_there=is_there, prefix=prefix)
            if failure and not runs_store:  # the store stays without this rank
                store.set(f"here/{identity.rank}", failure)
            else:
                _wait_for_all(identity, store, left, failure, runs_store)
            return store
        except (ConnectionError, OutcoreError) as error:
            if store is not None:
                store.close()
            if isinstance(error, OutcoreError):
                raise
            if is_there or _joined < 2 or time.monotonic() > deadline:
                raise _unreachable(identity, address, port, error) from error
        time.sleep(_AGAIN_S)


def _unreachable(identity: LauncherEnvironment, address: str, port: int, error: Exception) -> EngineError:
    return EngineError(
        f"rank {identity.rank} of {identity.size} ({identity.launcher}) could not reach the store at {address}:{port}: "
        f"{str(error).splitlines()[0]}; set MASTER_ADDR and MASTER_PORT to the host of rank 0"
    )


def _network() -> str:
    """The identity of the network namespace, equal for ranks that reach each other over loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


VARIABLE = "OUTCORE_SECRET"


def find_secret() -> str:
    """The secret of the run that this process belongs to."""
    if given := os.environ.get(VARIABLE):
        return given
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return _from_file(home / "outcore" / "secret")


def _from_file(path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        if not path.exists():
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(new_secret())
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)  # of several ranks that make it at once, one wins
            aside.unlink()
        mode = path.stat().st_mode
        found = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise EngineError(
            f"ranks need a secret that only they know, and {path} cannot be used ({error.strerror}); set {VARIABLE} "
            "to the same random text for all ranks"
        ) from error
    if stat.S_IMODE(mode) & 0o077 or len(found) < 16:
        raise EngineError(f"{path} is no secret (others may read it, or it is too short); remove it, or chmod 600")
    return found
