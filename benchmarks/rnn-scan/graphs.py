"""The same in CUDA graphs, where the host is out of the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from setting import Setting, data, make, milliseconds
from torch import Tensor, nn

from outcore.scan import Newton, Options


def graphed(setting: Setting, log: Callable[[str], None]) -> dict[str, Any]:
    """Forward, backward, and both, each recorded in a CUDA graph, so that the host is out of the way."""
    found: dict[str, Any] = {"setting": asdict(setting)}
    ways = {
        "cudnn": None,
        "scan": Options(backward="scan"),
        "products": Options(backward="scan", solver="products"),
        "parallel": Options(backward="scan", forward=Newton()),
    }
    for name, options in ways.items():
        found |= {f"{name}_{key}": value for key, value in recorded(setting, options).items()}
    cudnn, scanned = found["cudnn_both_ms"], found["scan_both_ms"]
    found["backward_faster"] = found["cudnn_backward_ms"] / found["scan_backward_ms"]
    found["step_faster"], found["amdahl"] = cudnn / scanned, cudnn / found["cudnn_forward_ms"]
    found["parallel_faster"] = cudnn / found["parallel_both_ms"]
    log(f"in CUDA graphs: {found}")
    return found


def recorded(setting: Setting, options: Options | None) -> dict[str, Any]:
    """Milliseconds of the replays, the largest difference of a gradient to the eager one, and the report."""
    model = make(setting, options, "cuda")
    x, label = data(setting, "cuda")
    parameters = list(model.parameters())
    side = torch.cuda.Stream()

    def forward() -> Tensor:
        return nn.functional.cross_entropy(model(x), label)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), parameters)

    plain = both()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            both()
        loss = forward()
        torch.autograd.grad(loss, parameters, retain_graph=True)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, parameters, retain_graph=True)

    found: dict[str, Any] = {}
    for part, run in (("forward", forward), ("backward", backward), ("both", both)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            kept = run()
        found[f"{part}_ms"] = milliseconds(graph.replay, 15)
    found["error"] = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(plain, kept, strict=True))
    found["report"] = str(getattr(model.layer, "report", None))
    return found


def graph_table(path: Path) -> str:
    """What was recorded, as Markdown."""
    lines = [
        "| cell | cuDNN F, B, F + B ms | scan B ms | by products | B faster | step, of what Amdahl allows "
        "| step with parallel forward ms | faster |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in json.loads(path.read_text())["graphs"]:
        if "failed" in row:
            continue
        every = ", loss at every step" if row["setting"]["every_step"] else ""
        cudnn = ", ".join(f"{row[f'cudnn_{part}_ms']:.2f}" for part in ("forward", "backward", "both"))
        share = row["step_faster"] / row["amdahl"]
        lines.append(
            f"| {row['setting']['cell']}{every} | {cudnn} | {row['scan_backward_ms']:.3f} "
            f"| {row['products_backward_ms']:.2f} | {row['backward_faster']:.0f}x "
            f"| {row['step_faster']:.2f}x of {row['amdahl']:.2f}x ({share:.0%}) "
            f"| {row['parallel_both_ms']:.2f} | {row['parallel_faster']:.0f}x |"
        )
    return "\n".join(lines)
