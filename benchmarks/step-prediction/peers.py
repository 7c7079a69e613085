"""What torch's own tools say of the same step: MemTracker of its peak, RuntimeEstimator of its time.

Both look at a step on fake tensors, so that nothing is run; RuntimeEstimator also runs every operator by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from networks import Network, Training
from torch._subclasses.fake_tensor import FakeTensorMode

Adam = torch.optim.Adam
ESTIMATES = {
    "runtime_estimator_s": "operator-level-cost-model",
    "runtime_estimator_benchmark_s": "operator-level-benchmark",
}
"""Both modes of RuntimeEstimator: by its cost model, and with every operator run by itself."""


def memtracker(network: Network, size: int, bf16: bool, device: torch.device) -> int | None:
    """The peak by torch.distributed._tools.MemTracker."""

    def peak(model: Training, batch: tuple[torch.Tensor, ...]) -> int:
        from torch.distributed._tools.mem_tracker import MemTracker

        optimizer = Adam(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch)
        with tracker:
            for i in range(2):
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if i == 0:
                    tracker.reset_mod_stats()
        found = tracker.get_tracker_snapshot("peak")
        return int(next(v for k, v in found.items() if torch.device(k).type == device.type)["Total"])

    return _on_fake_tensors(network, size, bf16, device, peak)


def runtime_estimator(network: Network, size: int, bf16: bool, device: torch.device, mode: str) -> float | None:
    """Seconds of a step by torch.distributed._tools.RuntimeEstimator."""

    def total(model: Training, batch: tuple[torch.Tensor, ...]) -> float:
        from torch.distributed._tools.runtime_estimator import RuntimeEstimator

        optimizer = Adam(model.parameters())
        model(*batch).backward()  # the optimizer's state is made outside
        optimizer.step()
        optimizer.zero_grad()
        estimator = RuntimeEstimator()
        with estimator(estimate_mode_type=mode):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(estimator.total_runtime) / 1e3

    return _on_fake_tensors(network, size, bf16, device, total)


def _on_fake_tensors(
    network: Network, size: int, bf16: bool, device: torch.device, look: Callable[..., Any]
) -> Any | None:
    try:
        with torch.device(device):
            model = Training(network.build(), network.loss, bf16).train()
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        for module in model.modules():
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    module._parameters[name] = torch.nn.Parameter(fake.from_tensor(tensor.detach()))
            for name, tensor in module._buffers.items():
                module._buffers[name] = fake.from_tensor(tensor) if tensor is not None else None
        with fake, torch.device(device):
            return look(model, network.batch(size))
    except Exception as error:
        print(f"  {look.__qualname__}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        return None


def main() -> None:
    """`peers.py NETWORK FILE [BATCH PRECISION]`: writes what the tools say of a network's cases, as it comes."""
    import json
    import sys
    import warnings
    from pathlib import Path

    import networks

    warnings.simplefilter("ignore")
    name, path, only = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    cuda = torch.cuda.is_available()
    device, network = torch.device("cuda" if cuda else "cpu"), (networks.GPU if cuda else networks.CPU)[name]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for size in network.batches[:2]:
        for precision in ("tf32", "bf16") if cuda else ("fp32",):
            if only and only != [str(size), precision]:
                continue
            bf16 = precision == "bf16"
            found[f"{size} {precision}"] = row = {"memtracker_bytes": memtracker(network, size, bf16, device)}
            path.write_text(json.dumps(found))
            if cuda:
                for name, mode in ESTIMATES.items():
                    row[name] = runtime_estimator(network, size, bf16, device, mode)
                    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
