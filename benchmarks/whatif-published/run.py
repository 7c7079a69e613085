"""Published training throughputs beside ours: python benchmarks/whatif-published/run.py; nothing is run or fitted.

The published figures are in `published.json`, each with where it stands. Mixed precision there is float16 with channels
last for images; the optimizer's step of BERT is shared by so many accumulated batches that it is left out. The rate of
matrix work that a figure implies stands beside it: no GPU can do more than its peak, so a figure that implies more was
not taken as it says.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore
from outcore.machine import parse
from outcore.whatif.elsewhere import record_on
from outcore.whatif.setup import TrainingSetup
from tests.foreign.shim import define_torchvision_operators

define_torchvision_operators()
HERE = Path(__file__).parent
SIDES = {"efficientnet_b4": 380}


class Bert(nn.Module):
    """The encoder of BERT-Large with a prediction of twenty (of 512, eighty) masked words."""

    def __init__(self, masked: int) -> None:
        super().__init__()
        self.words = nn.Embedding(30528, 1024)
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.1, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)
        self.out = nn.Linear(1024, 30528)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.layers(self.words(x))[:, : self.masked])
        return found


def job_of(network: str) -> outcore.Job:
    if network.startswith("bert"):
        length = int(network.rpartition("_")[2])
        masked = 20 if length == 128 else 80
        return outcore.Job(
            model=lambda: Bert(masked),
            batch=lambda n: (torch.randint(30000, (n, length)), torch.randint(30000, (n, masked))),
            loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
            name=network,
        )

    def model() -> nn.Module:
        import torchvision

        if network == "resnext101_32x4d":
            resnet = torchvision.models.resnet
            made: nn.Module = resnet.ResNet(resnet.Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4)
            return made
        return getattr(torchvision.models, network)()

    side = SIDES.get(network, 224)
    return outcore.Job(
        model=model,
        batch=lambda n: (torch.randn(n, 3, side, side), torch.randint(1000, (n,))),
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        name=network,
    )


def summary(name: str, rows: list[dict[str, Any]]) -> None:
    errors = sorted(abs(row["error"]) for row in rows)
    within = sum(error <= 0.15 for error in errors)
    median = statistics.median(errors)
    print(f"{name}: {len(rows)} figures, median error {median:.1%}, worst {errors[-1]:.0%}, {within} within 15 %")


def main() -> None:
    published = json.loads((HERE / "published.json").read_text())
    rows: list[dict[str, Any]] = []
    for row in published["rows"]:
        amp = row["precision"] == "amp"
        images = not row["network"].startswith("bert")
        setup = TrainingSetup(
            job_of(row["network"]), row["batch"], autocast=torch.float16 if amp else None, channels_last=amp and images
        )
        device = parse(row["gpu"]).devices[0]
        found = record_on(setup, device)
        step = found.step.simulate()
        predicted = row["batch"] / step.step_s
        used = {"tf32": "tf32", "fp32": "fp32", "amp": "fp16"}[row["precision"]]
        implied = row["per_s"] / row["batch"] * sum(t.flops for t in found.step.tasks.values()) / device.rates[used]
        rows.append(
            row
            | {"predicted_per_s": predicted, "error": predicted / row["per_s"] - 1, "bound_by": step.bound_by}
            | {"implied_share_of_peak": implied}
        )
        print(
            f"| {row['network']} | {row['gpu']} | {row['precision']} | {row['batch']} | {row['per_s']:,} | "
            f"{predicted:,.0f} | {rows[-1]['error']:+.0%} | {implied:.0%} |",
            flush=True,
        )
    summary("all", rows)
    summary("of the stated length", [row for row in rows if not row.get("shorter")])
    stored = {"date": str(datetime.date.today()), "source": published["source"], "rows": rows}
    (HERE / "results" / f"{datetime.date.today()}.json").write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
