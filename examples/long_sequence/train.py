"""Tell faults of a bearing apart from its vibration: a GRU over thousands of samples, trained end to end.

    python examples/long_sequence/train.py                    # a quarter of a minute on a CPU core
    python examples/long_sequence/train.py --steps 30000      # for a GPU
    python examples/long_sequence/train.py --baseline         # the same with torch.nn.GRU

A worn part strikes once per turn of that part, so each fault has its own period. The signal is synthetic:
strikes that ring out, drifting speed, noise.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

from outcore.scan import GRU

PERIODS = (23, 37, 59, 95)


class FaultClassifier(nn.Module):
    """Two recurrent layers over the raw samples, averaged over time."""

    def __init__(self, hidden: int, layer: type[nn.GRU]) -> None:
        super().__init__()
        self.recurrent = layer(1, hidden, num_layers=2)
        self.head = nn.Linear(hidden, len(PERIODS))

    def forward(self, signal: Tensor) -> Tensor:
        """Signals ``[time, batch, 1]`` to scores ``[batch, fault]``."""
        features, _ = self.recurrent(signal)
        return self.head(features.mean(0))


def vibration(steps: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Signals ``[steps, batch, 1]`` and which fault each has."""
    fault = torch.randint(len(PERIODS), (batch,), generator=generator)
    speed = 1 + 0.02 * torch.randn(batch, generator=generator)
    period = torch.tensor(PERIODS)[fault] * speed
    phase = torch.rand(batch, generator=generator) * period
    since_strike = (torch.arange(steps).unsqueeze(1) + phase) % period
    ringing = torch.exp(-since_strike / 6) * torch.cos(since_strike * 1.3)
    return (ringing + 0.1 * torch.randn(steps, batch, generator=generator)).unsqueeze(-1), fault


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="samples per signal")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--baseline", action="store_true", help="torch.nn.GRU instead")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = FaultClassifier(args.hidden, nn.GRU if args.baseline else GRU).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    right, began = 0.0, time.perf_counter()
    for i in range(1, args.iterations + 1):
        signal, fault = vibration(args.steps, args.batch, generator)
        scores = model(signal.to(device))
        loss = nn.functional.cross_entropy(scores, fault.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right = 0.9 * right + 0.1 * float((scores.argmax(1).cpu() == fault).float().mean())
        if i % 20 == 0:
            per_step = (time.perf_counter() - began) / i
            print(
                f"iteration {i:4}  loss {float(loss.detach()):.3f}  right {right:.0%}  {per_step:.3f} s each",
                flush=True,
            )
    if not args.baseline:
        print(model.recurrent.report)


if __name__ == "__main__":
    main()
