"""The same in CUDA graphs, where the host is out of the way, and over the length of chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from setting import Setting, data, device_milliseconds, make, milliseconds
from torch import Tensor, nn

from outcore.scan import Newton, Options


def graphed(setting: Setting, log: Callable[[str], None]) -> dict[str, Any]:
    """Forward, and forward with backward, each recorded in a CUDA graph, so that the host is out of the way."""
    found: dict[str, Any] = {"setting": asdict(setting)}
    ways = {
        "cudnn": None,
        "scan": Options(backward="scan"),
        "products": Options(backward="scan", solver="products"),
        "parallel": Options(backward="scan", forward=Newton()),
    }
    for name, options in ways.items():
        model = make(setting, options, "cuda")
        x, label = data(setting, "cuda")
        parameters = list(model.parameters())

        def forward(model: nn.Module = model, x: Tensor = x, label: Tensor = label) -> Tensor:
            return nn.functional.cross_entropy(model(x), label)

        def both(parameters: list[nn.Parameter] = parameters, forward: Callable[[], Tensor] = forward) -> Any:
            return torch.autograd.grad(forward(), parameters)

        plain = both()
        for part, run in (("forward", forward), ("both", both)):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = run()
            found[f"{name}_{part}_ms"] = milliseconds(graph.replay, 15)
        found[f"{name}_error"] = max(
            float((a - b).abs().max() / a.abs().max()) for a, b in zip(plain, kept, strict=True)
        )
        report = getattr(model.layer, "report", None)
        found[f"{name}_report"] = str(report)
    forward_ms, cudnn, scanned = found["cudnn_forward_ms"], found["cudnn_both_ms"], found["scan_both_ms"]
    found["backward_faster"] = (cudnn - forward_ms) / (scanned - found["scan_forward_ms"])
    found["step_faster"], found["amdahl"] = cudnn / scanned, cudnn / forward_ms
    found["parallel_faster"] = cudnn / found["parallel_both_ms"]
    log(f"in CUDA graphs: {found}")
    return found


def chunk_lengths(setting: Setting, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time on the device of the backward pass over the length of the chunks."""
    x, label = data(setting, "cuda")
    rows = []
    for solver in ("relaxation", "products"):
        for chunk in (40, 57, 80, 114, 160, 228):
            model = make(setting, Options(backward="scan", solver=solver, chunk=chunk), "cuda")
            for _ in range(2):
                nn.functional.cross_entropy(model(x), label).backward()
            value = nn.functional.cross_entropy(model(x), label)
            torch.cuda.synchronize()
            busy = device_milliseconds(value.backward)
            sweeps = model.layer.report.layers[0].sweeps
            rows.append({"setting": asdict(setting), "solver": solver, "chunk": chunk, "ms": busy, "sweeps": sweeps})
    log(
        f"{setting.cell} chunks: "
        + ", ".join(f"{r['solver']} {r['chunk']} {r['ms']:.2f} ({r['sweeps']})" for r in rows)
    )
    return rows
