"""What was chosen for a compiled model, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.machine.units import format_bytes
from outcore.program.policies import Policy

__all__ = ["CompiledPlan"]


@dataclass(frozen=True)
class CompiledPlan:
    """A step of Inductor's kernels, cut by our choice of what is saved."""

    budget_bytes: int | None
    peak_bytes: int
    """Predicted, with weights, gradients, optimizer state and arguments."""
    fastest_bytes: int
    """The same for what torch.compile chooses by itself."""
    plain_bytes: int
    """The same for plain training."""
    least_bytes: int
    """The smallest peak that was found."""
    measured_bytes: int | None
    """Of a step that was tried before training."""
    measured_s: float | None
    """The same step's time, with the loss that was tried; on a GPU."""
    corrected_bytes: int
    """What steps were seen to take beyond the prediction, and is left free."""
    seconds: float
    """Predicted for a step: the longer of what host and device take, with the optimizer."""
    fastest_s: float
    """The same for what torch.compile chooses by itself."""
    pieces: int
    """Compiled pieces of the model: one, unless Python could not be traced somewhere."""
    saved_bytes: int
    offloaded_bytes: int
    """Of the saved bytes, those that leave the device in between."""
    again: int
    """Values of the forward that the backward makes again."""
    compile_s: float
    """What compiling took."""
    chunk_rows: int | None = None
    """Rows of a chunk, where the last layer and its loss run apart in chunks."""
    graphs: bool = False
    """Whether forward and backward are CUDA graphs."""
    micro_batches: int = 1
    """Parts in which a call runs its batch."""
    kept: int = 1
    """Of those, how many keep what their backward needs; the others run again in the backward."""
    host_s: float = 0.0
    """Predicted for the host alone, to launch a step; nothing on a CPU."""

    exactness = "reassociated"

    @property
    def policy(self) -> dict[str, Policy]:
        """By value of the user's model: none, since what is saved are values of the joint graph."""
        return {}

    @property
    def slowdown(self) -> float:
        """Predicted time over that of torch.compile by itself."""
        return self.seconds / self.fastest_s if self.fastest_s else 1.0

    def explain(self) -> str:
        """The plan in a few lines."""
        lines = [
            f"peak {format_bytes(self.peak_bytes)} predicted (torch.compile {format_bytes(self.fastest_bytes)}, "
            f"plain {format_bytes(self.plain_bytes)}); "
            f"{self.slowdown:.2f}x the time of torch.compile; compiled in {self.compile_s:.0f} s as {self.pieces} "
            f"piece{'s' * (self.pieces != 1)}",
            f"  {format_bytes(self.saved_bytes)} saved for the backward, {self.again} values made again in it; results "
            "are reassociated, and random numbers are those of torch.compile",
        ]
        if self.micro_batches > 1:
            again = self.micro_batches - self.kept
            lines.append(
                f"  each call runs its batch in {self.micro_batches} micro-batches, {again} of them again in backward"
            )
        if self.offloaded_bytes:
            lines.append(f"  {format_bytes(self.offloaded_bytes)} of them leave the device until the backward")
        if self.chunk_rows is not None:
            lines.append(
                f"  the last layer and its loss are not compiled: they run in chunks of {self.chunk_rows} rows"
            )
        if self.host_s > 0.8 * self.seconds:
            lines.append(
                f"  launching a step takes the host {1e3 * self.host_s:.1f} ms, as long as the device or longer: "
                "graphs=True, or a larger batch, would use the device better"
            )
        if self.graphs:
            lines.append("  forward and backward are CUDA graphs; their memory stays reserved between steps")
        if self.measured_bytes is not None:
            lines.append(f"  measured {format_bytes(self.measured_bytes)} in a step before training")
        if self.corrected_bytes:
            lines.append(f"  {format_bytes(self.corrected_bytes)} of the budget are left for what predictions miss")
        return "\n".join(lines)
