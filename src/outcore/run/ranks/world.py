"""The ranks of a run: which rank this process is, which others there are, and small collectives between them.

A process learns its rank from whatever launched it: torchrun, SLURM, mpirun, or nobody, which is a world of one that
needs no process group at all. The ranks rendezvous in a store that only they may use (`outcore.run.ranks.rendezvous`).
Small values (shapes, losses, norms, checksums) are exchanged as numbers or JSON text through one gloo group on the
hosts, those of every step without gloo where ranks can (`World.exchange`); nothing is pickled. `share` and `numbers`
are collective: every rank calls them, in one order.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from outcore.errors import EngineError
from outcore.run.ranks.current_work import CurrentWork
from outcore.run.ranks.rendezvous import LauncherEnvironment, Rendezvous, meet, meet_over
from outcore.run.transport.socket_shutdown import GroupSockets
from outcore.run.transport.watched_wait import WatchedWait

_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
_RANKS_HERE = {
    "Open MPI": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MVAPICH": "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPICH": "MPI_LOCALNRANKS",
}
"""How many ranks mpirun started on this host: it says nothing of where the others are."""
_PORT = 29500
_EXCHANGED_BYTES = 4096
"""Of what every rank sends to every other; more is added up by gloo."""
_met: list[Rendezvous] = []
"""The rendezvous of this process with the others that its launcher started, as long as it is one of them."""


def identify(variables: Mapping[str, str]) -> LauncherEnvironment | None:
    """Read the variables of torchrun, SLURM or mpirun; None where nobody launched several ranks.

    >>> identify({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}).rank
    1
    """
    for launcher, rank, size, local in _LAUNCHERS:
        if rank in variables and (count := _number(variables, size, 1)) > 1:
            address = variables.get("MASTER_ADDR") or _first_host(launcher, count, variables)
            port = _number(variables, "MASTER_PORT", _port(variables))
            mine, here = _number(variables, rank, 0), _number(variables, local, 0)
            if not (0 <= mine < count and 0 < port < 65_536):
                raise EngineError(
                    f"{launcher} says rank {mine} of {count} and port {port}; ranks go from 0 to {count - 1}, ports "
                    "up to 65535"
                )
            return LauncherEnvironment(launcher, mine, count, here, address, port)
    return None


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    given = variables.get(name) or str(default)
    if not given.strip().isdecimal():
        raise EngineError(f"{name}={given!r} was given; it must be a number, as launchers set it, or not be set")
    return int(given)


def _first_host(launcher: str, count: int, variables: Mapping[str, str]) -> str:
    """The host of rank 0, where the launcher says which it is."""
    here = _number(variables, _RANKS_HERE.get(launcher, ""), count)
    if here < count:
        raise EngineError(
            f"{launcher} started {count} ranks, {here} of them on this host, and does not say where rank 0 is; give "
            "its host's address: mpirun -x MASTER_ADDR=node07 ..., or export MASTER_ADDR before"
        )
    if variables.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    if launcher == "SLURM" and (nodes := variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")):
        head, bracket, inside = nodes.partition("[")
        return head + inside.split(",")[0].split("-")[0].rstrip("]") if bracket else nodes.split(",")[0]
    return "127.0.0.1"


def _port(variables: Mapping[str, str]) -> int:
    """A port that two jobs on one node do not share."""
    job = variables.get("SLURM_JOB_ID", "")
    return 15000 + int(job) % 20000 if job.isdigit() else _PORT


class World:
    """All ranks of a run; the process group, if there is one, is torch's."""

    def __init__(
        self, rank: int, size: int, local_rank: int, group: Any, meeting: Rendezvous | None, *, owned: bool
    ) -> None:
        self.place = CurrentWork()
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.group, self.meeting = group, meeting
        self.p2p_group: Any = None
        """A group for point-to-point messages. A collective that fails on `group` leaves messages in its connections
        that nobody reads any more, and what is sent behind them would never arrive."""
        self.exchange: Callable[[bytes], Callable[[], list[bytes]]] | None = None
        """Starts to exchange a few bytes with all ranks without gloo, once all of them can
        (`outcore.run.transport.shared_memory`)."""
        self._owned = owned
        self._groups: list[Any] = []
        self._lines = GroupSockets()
        self.watched_wait = WatchedWait(self.place)
        self.leftovers: list[Any] = []
        """Buffers of what was under way when this rank failed: gloo may still write into them."""

    @classmethod
    def join(cls, *, timeout_s: float) -> World:
        """The world this process belongs to; joins the others if a launcher started several."""
        if dist.is_initialized():
            local = int(os.environ.get("LOCAL_RANK", "0"))
            rank, size = dist.get_rank(), dist.get_world_size()
            if size == 1:
                return cls(0, 1, local, None, None, owned=False)
            world = cls(rank, size, local, None, None, owned=False)
            world.watched_wait.timeout_s = timeout_s
            world.group, world.p2p_group = (world.new_group(range(size), timeout_s) for _ in range(2))
            known = _met[-1].beside() if _met else None
            world.meeting = known if known is not None else meet_over(world, timeout_s)
            return world
        identity = identify(os.environ)
        if identity is None:
            return cls(0, 1, 0, None, None, owned=False)
        # Its functions have the group of the moment of their import as a default, and would keep it for good.
        import torch.distributed.nn.functional  # noqa: F401

        meeting = meet(identity, timeout_s)
        _met.append(meeting)
        world = cls(identity.rank, identity.size, identity.local_rank, None, meeting, owned=True)
        world.watched_wait.timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        with world._lines.noted():
            dist.init_process_group(
                "gloo", store=meeting.store, rank=world.rank, world_size=world.size, timeout=timeout
            )
        world.group, world.p2p_group = dist.group.WORLD, world.new_group(range(world.size), timeout_s)
        return world

    def new_group(self, ranks: Sequence[int], timeout_s: float) -> Any:
        """A group of some ranks; collective over all ranks, also those outside."""
        with self._lines.noted():
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo")
        if self.rank in ranks:
            self._groups.append(group)
        return group

    def numbers(self, row: Sequence[int]) -> list[list[int]]:
        """One row of whole numbers from every rank, by rank."""
        return self.start_numbers(row)()

    def start_numbers(self, row: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Start to exchange a row of whole numbers with all ranks; returns a function that waits for theirs, by
        rank."""
        if self.size == 1:
            return lambda: [list(row)]
        if self.exchange is not None:
            theirs = self._exchanged(array("q", row).tobytes())
            return lambda: [array("q", text).tolist() for text in theirs()]
        table = torch.zeros(self.size, len(row), dtype=torch.int64, device="cpu")
        mine = torch.tensor(row, dtype=torch.int64, device="cpu")
        work: Any = dist.all_gather(list(table), mine, group=self.group, async_op=True)

        def wait() -> list[list[int]]:
            self.watched_wait.wait(work)
            rows: list[list[int]] = table.tolist()
            return rows

        return wait

    def share(self, value: Any) -> list[Any]:
        """One JSON value from every rank, by rank."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        sizes = [row[0] for row in self.numbers([len(text)])]
        width = max(sizes)
        mine = torch.zeros(width, dtype=torch.uint8, device="cpu")
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = list(torch.zeros(self.size, width, dtype=torch.uint8, device="cpu"))
        self.watched_wait.wait(dist.all_gather(rows, mine, group=self.group, async_op=True))
        return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor on the host over all ranks, in place."""
        return self.watched_wait.sum_(tensor, self.group) if self.size > 1 else tensor

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start to add a tensor on the host over all ranks, in place; returns a function that waits for it."""
        if self.size == 1:
            return lambda: None
        if self.exchange is not None and tensor.nbytes <= _EXCHANGED_BYTES:
            theirs = self._exchanged(tensor.numpy().tobytes())

            def add() -> None:
                rows = [torch.frombuffer(bytearray(text), dtype=tensor.dtype) for text in theirs()]
                tensor.copy_(torch.stack(rows).sum(0).view(tensor.shape))

            return add
        work: Any = dist.all_reduce(tensor, group=self.group, async_op=True)
        return lambda: self.watched_wait.wait(work)

    def _exchanged(self, payload: bytes) -> Callable[[], list[bytes]]:
        assert self.exchange is not None
        with self.place.communicating():
            wait = self.exchange(payload)

        def theirs() -> list[bytes]:
            with self.place.communicating():
                return wait()

        return theirs

    def broadcast_(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Copy a tensor on the host of one rank to all, in place."""
        return self.watched_wait.broadcast_(tensor, source, self.group) if self.size > 1 else tensor

    def gather(self, mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of all ranks by name, on the host of every rank; of equal names, the first rank's."""
        found: dict[str, torch.Tensor] = {}
        shared = self.share({n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in mine.items()})
        for rank, row in enumerate(shared):
            for name, (shape, dtype) in row.items():
                if name not in found:
                    empty = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
                    found[name] = mine[name].detach().cpu().clone() if rank == self.rank else empty
                    self.broadcast_(found[name], rank)
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.numbers([0])

    def cut(self) -> None:
        """Break all connections after a failure, so that whoever waits for this rank stops waiting now."""
        self._lines.cut()

    def close(self) -> None:
        """Leave; only what this world made is taken down."""
        last = [self.leftovers, *self._groups, self.group]
        meeting, self.meeting = self.meeting, None
        self.group = self.p2p_group = self.watched_wait.look = self.exchange = None
        while self._groups:
            dist.destroy_process_group(self._groups.pop())
        self.leftovers = []
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
        self.rank, self.size, self._owned = 0, 1, False
        failed = self._lines.are_cut
        self._lines.let_go(last)
        if meeting is not None:
            if meeting in _met:
                _met.remove(meeting)
            meeting.leave(failed=failed)
