"""What a scanned layer did: what was chosen and why, predicted memory, solver, iterations."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LayerReport", "Report"]


@dataclass(slots=True)
class LayerReport:
    """One layer of one call."""

    segment: int = 0
    """Steps handled at a time; fewer than the sequence has when memory is short."""
    chunk: int = 0
    predicted_bytes: int = 0
    """Workspace of the backward pass, before it ran."""
    solvers: list[str] = field(default_factory=list)
    """Per segment: ``relaxation``, ``products`` or ``sequential``; empty until backward has run."""
    sweeps: int = 0
    engine: str = ""
    """``triton`` or ``torch``."""
    iterations: int = 0
    """Of the parallel forward pass; 0 where it was not asked for."""
    correction: float = 0.0
    """Largest correction of a state in its last iteration."""
    fell_back: str = ""
    """Why the forward pass ran sequentially although a parallel one was asked for."""

    def __str__(self) -> str:
        size = f"{self.predicted_bytes:,} bytes predicted"
        parts = [f"chunks of {self.chunk} in segments of {self.segment} steps, {size}"]
        if self.solvers:
            parts.append(f"{', '.join(dict.fromkeys(self.solvers))} in {self.sweeps} sweeps ({self.engine})")
        if self.iterations:
            parts.append(f"forward in {self.iterations} iterations, last correction {self.correction:.1e}")
        if self.fell_back:
            parts.append(f"forward sequential: {self.fell_back}")
        return "; ".join(parts)


@dataclass(slots=True)
class Report:
    """The last call of a scanned module."""

    backward: str
    """``scan`` or ``torch``."""
    reason: str
    layers: list[LayerReport] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"backward by {self.backward}: {self.reason}"]
        lines += [f"  layer {i}: {layer}" for i, layer in enumerate(self.layers)]
        return "\n".join(lines)
