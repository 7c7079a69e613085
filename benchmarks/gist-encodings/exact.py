"""Whether exact encodings give the gradients of plain training bit for bit, per network.

    python benchmarks/gist-encodings/exact.py --out results/2026-11-16-h200-exact.json

float32 (TF32), and bfloat16 with channels last; cuDNN is told to be deterministic, plain training compared with itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from pathlib import Path
from typing import Any

import torch
from run import DEVICE, Case, Subject, policy_for

CASES = "alexnet:8x224,vgg19:8x224,inception_v3:8x299,resnet50:8x224,unet:2x224,densenet121:8x224"
KINDS = ("lossless", "again", "sparse")


def cast(bf16: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(DEVICE, torch.bfloat16) if bf16 else contextlib.nullcontext()


def found(subject: Subject, kind: str, state: dict[str, torch.Tensor], bf16: bool) -> list[torch.Tensor]:
    """The loss and all gradients, from the same state."""
    subject.model.load_state_dict(state)
    subject.enter(kind)
    torch.manual_seed(3)
    with cast(bf16):
        loss = subject.model(subject.images).float().square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(subject.model.parameters()))]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    return sum(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def row_of(text: str, last: bool, bf16: bool) -> dict[str, Any]:
    with cast(bf16):
        subject = Subject(Case.of(text + (":last" if last else "")))
        state = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
        for kind in KINDS:
            subject.prepare(kind)
    plain = found(subject, "plain", state, bf16)
    row = {"case": text, "last": last, "bf16": bf16, "of": len(plain)}
    row["plain repeats"] = equal(plain, found(subject, "plain", state, bf16))
    for kind in KINDS:
        row[kind] = equal(plain, found(subject, kind, state, bf16))
        row[f"{kind} codecs"] = len(policy_for(subject.keeping, kind))
    subject.enter("plain")
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--cases", default=CASES)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.deterministic = True
    rows = []
    for text in args.cases.split(","):
        for last, bf16 in ((False, False), (True, True)):
            rows.append(row_of(text, last, bf16))
            print(json.dumps(rows[-1]), flush=True)
            args.out.write_text(json.dumps({"equal": rows}, indent=1) + "\n")
            gc.collect()


if __name__ == "__main__":
    main()
