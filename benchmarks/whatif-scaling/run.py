"""The case study: four networks on up to 1,024 V100s over three links: python benchmarks/whatif-scaling/run.py.

Nothing is run: one rank is simulated. Pictures go to docs/pictures.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.machine import parse
from outcore.whatif.links import parse_link
from outcore.whatif.scaling import scale_out
from outcore.whatif.scaling_plot import scaling_svg
from tests.foreign.shim import define_torchvision_operators

define_torchvision_operators()
HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "docs" / "pictures"
NETWORKS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "vgg19": (32, 224, {}),
    "alexnet": (128, 224, {}),
    "resnet50": (32, 224, {}),
    "inception_v3": (32, 299, {"aux_logits": False, "init_weights": False}),
}
GPUS = [1, 2, 4, 8, 16, 64, 1024]


def job_of(name: str) -> outcore.Job:
    batch, side, options = NETWORKS[name]

    def model() -> nn.Module:
        import torchvision

        made: nn.Module = getattr(torchvision.models, name)(**options)
        return made

    return outcore.Job(
        model=model,
        batch=lambda n: (torch.randn(n, 3, side, side), torch.randint(1000, (n,))),
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        name=name,
        size=batch,
    )


def main() -> None:
    device = parse("v100").devices[0]
    rows = []
    for name in NETWORKS:
        for link in ("nvlink", "pcie3", "10gbe"):
            for mode in ("weak", "strong"):
                start = time.perf_counter()
                counts = GPUS if mode == "weak" else [1, 2, 4, 8, 16]
                found = scale_out(job_of(name), counts, parse_link(link, device), device=device, mode=mode)  # type: ignore[arg-type]
                took = time.perf_counter() - start
                points = " ".join(f"{p.gpus}: {p.efficiency:.0%}" for p in found.of("data_parallel"))
                print(f"| {name} | {link} | {mode} | {points} | {found.verdict()} |", f"{took:.1f} s", flush=True)
                rows.append(found.to_json() | {"took_s": took})
                if name == "vgg19" and link == "10gbe":
                    (PICTURES / f"vgg19-{mode}-scaling.svg").write_text(scaling_svg(found))
    path = HERE / "results" / f"{datetime.date.today()}.json"
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
