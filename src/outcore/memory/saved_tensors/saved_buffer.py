"""A buffer of a forward that the user's own code runs.

What writes it is not known before it happens, so the cell collects the calls that do
(`outcore.memory.saved_tensors.recompute`) and counts who will ask for it: every saved tensor that points to it and
every other cell that is made from it. When its last use in forward is over, the policy is carried out if it still can
be. Where it cannot (a call that is not known to give the same numbers, a write that nobody recorded), the memory is
simply kept: that is always right.

Every saved tensor remembers the version of the memory it was saved from. One that was overwritten before the cell left
is refused when backward asks for it, as autograd refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from outcore.graph.structure import leaves
from outcore.memory.offload.backends import Backend
from outcore.memory.replay.replay_buffer import Geometry, ReplayBuffer, as_it_lay, graph_is_kept, over
from outcore.memory.saved_tensors.recompute import RecordedCall, version_of
from outcore.memory.saved_tensors.recompute_batch_norm import BatchNormCall, Statistics
from outcore.program.policies import KEEP, Keep, Policy, Recompute

if TYPE_CHECKING:
    from outcore.kernels.pool_window import PoolWindow
    from outcore.memory.saved_tensors.saved_buffers import SavedBuffers


class SavedBuffer(ReplayBuffer):
    """One buffer of one forward pass, with the calls that wrote it."""

    owner: SavedBuffers  # type: ignore[assignment]

    def __init__(
        self, name: str, policy: Policy, owner: SavedBuffers, *, derived: bool = False, window: PoolWindow | None = None
    ) -> None:
        self.name, self.policy, self.owner, self.window = name, policy, owner, window
        self.uses, self.derived = 0, derived
        self.writers: list[RecordedCall] = []

    derived: bool
    """An operation made it for its own backward."""
    path = ""
    """Where it stands in what its first writer returns."""
    lay: Geometry | None = None
    norm: tuple[BatchNormCall, Statistics] | None = None
    """The batch norm that its first writer is, where that can be made again from its statistics."""
    rectified = False
    """Its second writer is a ReLU."""
    has_left = False
    cast: torch.dtype | None = None
    """It is a copy in another type of what its only writer holds."""
    rescued = False
    """Its memory is not the one that was saved."""
    written = 0
    """The version of its memory after the last write that was recorded."""

    # Forward

    def wrote(self, call: RecordedCall | None) -> None:
        """A call has written it; none for one that cannot be repeated."""
        if type(self.policy) is not Recompute:
            return
        if call is None:
            self.keep()
            return
        self.writers.append(call)
        if self.memory is not None:
            self.written = version_of(self.memory)
        for argument in call.arguments:
            if (source := argument.cell) is not None:
                if source.policy.codec == "sign":
                    source.policy = KEEP
                source.uses += 1

    def keep_if_written_unseen(self) -> None:
        """Give up recomputing it if somebody has written it whose call was not seen: a custom operator, a compiled
        function, another thread."""
        if type(self.policy) is Recompute and not self.derived and self.memory is not None:
            if version_of(self.memory) != self.written:
                self.keep()

    def keep(self) -> None:
        """Give up recomputing the buffer: it is kept, and the calls that wrote it are forgotten."""
        self.policy = KEEP
        self._forget_writers()

    def leave(self, tier: Backend | None) -> None:
        """Carry out the policy, now that the last use in forward is over."""
        self.has_left = True
        self.keep_if_written_unseen()
        if type(self.policy) is Recompute:
            if not self.writers:
                self.policy = KEEP
            elif self.uses and self.memory is not None and not self.derived:  # as most are
                self.version = version_of(self.memory)
                self.saved = self.away = True
                self.memory = None
                return
        if self.writers and (not self.uses or isinstance(self.policy, Keep)):
            self._forget_writers()
        if self.memory is not None and not self.derived:
            self.version = version_of(self.memory)
            self.saved = True
        super().leave(tier)

    def rescue(self) -> None:
        """What it is made from is about to be overwritten: bring it back now, and keep it."""
        if not isinstance(self.policy, Recompute) or self.memory is not None or not self.writers:
            return
        self.memory = self._brought_back_early()
        self.away, self.policy = False, KEEP
        self.version, self.rescued = self.memory._version, True
        self._forget_writers()

    def _brought_back_early(self) -> torch.Tensor:
        """Its memory, made before backward asks for it.

        What it is made from is not used up by that: whatever comes back on the way can come back again, so nobody
        counts who asked, and it leaves again. (In a backward that frees its graph everything comes back once.)
        """
        if not graph_is_kept():
            return self.bring_back()
        came: list[SavedBuffer] = []
        self.owner.rescuing = came
        try:
            memory = self.bring_back()
        finally:
            self.owner.rescuing = None
        for cell in came:
            if cell is not self and cell.away:
                cell.memory = None
        return memory

    def bring_back(self) -> torch.Tensor:
        """Restore the memory and keep it for later uses."""
        memory = super().bring_back()
        if self.owner.rescuing is not None:
            self.owner.rescuing.append(self)
        return memory

    # Backward

    def view(self, geometry: Geometry, version: int | None = None) -> torch.Tensor:
        """A tensor in its memory, which comes back if it must."""
        if version is not None and version != self.version and not self.derived and not self.rescued:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.name} is at version {self.version}; expected version {version}"
            )
        memory = self.memory
        if memory is None:
            if self.spoiled:
                self._refuse()
            memory = self.bring_back()
        elif self.spoiled or (not self.away and memory._version != self.version):
            self._refuse()
        tensor = over(memory, geometry, self.dtype)
        if self.owner.rescuing is not None:
            return tensor
        self.asked += 1
        if self.asked >= self.uses:
            self.asked = 0
            if self.away:
                self.memory = None
        return tensor

    def reads(self, address: int) -> bool:
        """Whether making it again reads what is in the memory at an address."""
        return any(
            a.address == address and (a.tensor is not None or (a.cell is not None and a.cell.memory is not None))
            for call in self.writers
            for a in call.arguments
        )

    def made_from(self) -> Iterable[ReplayBuffer]:
        """The cells that making it again reads."""
        return (source for call in self.writers for source in self._sources(call))

    def recompute_chain(self) -> None:
        """Make it again, after all that it is made from (chains may be longer than Python's stack)."""
        for call in self.writers:
            for argument in call.arguments:
                if (source := argument.cell) is not None and source.memory is None:
                    if source.offloaded is None and source.coded is None:
                        super().recompute_chain()
                        return
        self.recompute()

    def recompute(self) -> None:
        """Make it again from what its writers read."""
        keeper, writers = self.owner.keeper, self.writers
        first = writers[0]
        if self.cast is not None:
            (source,) = first.arguments
            if source.tensor is not None and version_of(source.tensor) != source.version:
                source.refuse()
            self.memory = source.value(None).to(self.cast)
        elif self.norm is not None and (len(writers) == 1 or (self.rectified and len(writers) == 2)):
            norm, statistics = self.norm
            x = first.arguments[0].value(None)
            self.memory = self.owner.table.renorm.run(replace(norm, relu=len(writers) == 2), x, statistics)
        else:
            made = first.run(None, keeper)
            if type(made) is not torch.Tensor:
                made = _picked(made, self.path)
            made = as_it_lay(made.detach() if made.requires_grad else made, self.lay)
            for i in range(1, len(writers)):
                writers[i].run(made, keeper)
            self.memory = made.detach() if made.requires_grad else made
        if self.owner.rescuing is not None:
            self.owner.rescuing.append(self)
        if not graph_is_kept():
            self.writers = []

    def _forget_writers(self) -> None:
        for call in self.writers:
            for source in self._sources(call):
                source.uses -= 1
                if source.has_left and not source.uses:
                    source.memory = None
        self.writers = []

    def _sources(self, call: RecordedCall) -> Iterable[SavedBuffer]:
        return (a.cell for a in call.arguments if a.cell is not None)  # type: ignore[misc]


def _picked(result: Any, path: str) -> torch.Tensor:
    """The tensor at a path of a result."""
    if isinstance(result, torch.Tensor):
        return result
    found: torch.Tensor = dict(leaves(result, torch.Tensor))[path]
    return found
