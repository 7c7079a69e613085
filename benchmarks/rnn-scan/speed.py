"""Backward pass and training step on the clock, and the table of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from setting import Setting, data, device_milliseconds, make, milliseconds
from torch import Tensor, nn

from outcore.scan import Newton, Options


@dataclass
class Row:
    """What was measured, in milliseconds."""

    setting: Setting
    cudnn_forward_ms: float = 0.0
    cudnn_backward_ms: float = 0.0
    cudnn_step_ms: float = 0.0
    scan_backward_ms: float = 0.0
    products_backward_ms: float = 0.0
    scan_step_ms: float = 0.0
    parallel_forward_ms: float = 0.0
    parallel_step_ms: float = 0.0
    automatic_step_ms: float = 0.0
    cudnn_backward_device_ms: float = 0.0
    scan_backward_device_ms: float = 0.0
    products_backward_device_ms: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)


def measure(setting: Setting, repeats: int, log: Callable[[str], None]) -> Row:
    device = "cuda"
    x, label = data(setting, device)
    row = Row(setting)

    def times(options: Options | None) -> tuple[float, float, float, float, Any]:
        model = make(setting, options, device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, foreach=True)

        def loss() -> Tensor:
            return nn.functional.cross_entropy(model(x), label)

        def step() -> None:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

        forward = milliseconds(loss, repeats)
        backward = milliseconds(lambda value: value.backward(), repeats, loss)
        whole = milliseconds(step, repeats)
        value = loss()
        torch.cuda.synchronize()
        busy = device_milliseconds(value.backward)
        return forward, backward, whole, busy, getattr(model.layer, "report", None)

    row.cudnn_forward_ms, row.cudnn_backward_ms, row.cudnn_step_ms, row.cudnn_backward_device_ms, _ = times(None)
    _, row.scan_backward_ms, row.scan_step_ms, row.scan_backward_device_ms, report = times(Options(backward="scan"))
    row.notes["scan"] = str(report)
    products = Options(backward="scan", solver="products")
    _, row.products_backward_ms, _, row.products_backward_device_ms, report = times(products)
    row.notes["products"] = str(report)
    row.parallel_forward_ms, _, row.parallel_step_ms, _, report = times(Options(backward="scan", forward=Newton()))
    row.notes["parallel"] = str(report)
    _, _, row.automatic_step_ms, _, report = times(Options())
    row.notes["automatic"] = str(report)
    log(
        f"{setting.cell:4} T {setting.steps:6} N {setting.batch:4} H {setting.hidden:4} "
        f"| cuDNN F {row.cudnn_forward_ms:8.3f} B {row.cudnn_backward_ms:8.3f} step {row.cudnn_step_ms:8.3f} "
        f"| scan B {row.scan_backward_ms:7.3f} ({row.cudnn_backward_ms / row.scan_backward_ms:6.1f}x) "
        f"products B {row.products_backward_ms:7.3f} ({row.cudnn_backward_ms / row.products_backward_ms:6.1f}x) "
        f"step {row.cudnn_step_ms / row.scan_step_ms:5.2f}x of {bound(row):5.2f}x "
        f"| parallel F {row.parallel_forward_ms:7.3f} step {row.cudnn_step_ms / row.parallel_step_ms:6.2f}x "
        f"| device B {row.cudnn_backward_device_ms:.3f} / {row.scan_backward_device_ms:.3f} / "
        f"{row.products_backward_device_ms:.3f} "
        f"| automatic {row.cudnn_step_ms / row.automatic_step_ms:5.2f}x {str(report).split(':')[0]}"
    )
    return row


def automatic(setting: Setting, log: Callable[[str], None]) -> dict[str, Any]:
    """torch's step and the automatic one in turns, for what is slow or fast on the host then is so for both."""
    x, label = data(setting, "cuda")
    models = {"torch": make(setting, None, "cuda"), "automatic": make(setting, Options(), "cuda")}
    optimizers = {name: torch.optim.Adam(model.parameters(), lr=1e-5, foreach=True) for name, model in models.items()}
    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(41):
        for name, model in models.items():

            def step(name: str = name, model: nn.Module = model) -> None:
                optimizers[name].zero_grad()
                nn.functional.cross_entropy(model(x), label).backward()
                optimizers[name].step()

            found[name].append(milliseconds(step, 1))
    medians = {f"{name}_step_ms": statistics.median(times) for name, times in found.items()}
    ratio = medians["torch_step_ms"] / medians["automatic_step_ms"]
    chosen = str(models["automatic"].layer.report).split(":")[0]
    log(f"in turns: {setting}: {medians}, {ratio:.2f}x, {chosen}")
    return {"setting": asdict(setting), **medians, "chosen": chosen}


def bound(row: Row) -> float:
    """What Amdahl allows when only the backward pass gets faster."""
    return (row.cudnn_forward_ms + row.cudnn_backward_ms) / row.cudnn_forward_ms


def table(paths: list[Path]) -> str:
    """The rows of result files as Markdown, later files winning where both have a setting."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            if "failed" not in row:
                rows[tuple(row["setting"].values())] = row
    lines = [
        "| cell | T | batch | hidden | cuDNN F, B ms | scan B ms (on the device) | B by products ms | B faster "
        "| step, of what Amdahl allows | step with parallel forward | automatic choice, step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows.values():
        setting = row["setting"]
        scanned = row["scan_backward_ms"]
        limit = (row["cudnn_forward_ms"] + row["cudnn_backward_ms"]) / row["cudnn_forward_ms"]
        busy = row.get("scan_backward_device_ms")
        device = f" ({busy:.2f} of {row['cudnn_backward_device_ms']:.1f})" if busy else ""
        every = ", loss at every step" if setting["every_step"] else ""
        lines.append(
            f"| {setting['cell']}{every} | {setting['steps']} | {setting['batch']} | {setting['hidden']} "
            f"| {row['cudnn_forward_ms']:.2f}, {row['cudnn_backward_ms']:.2f} | {scanned:.2f}{device} "
            f"| {row['products_backward_ms']:.2f} | {row['cudnn_backward_ms'] / scanned:.1f}x "
            f"| {row['cudnn_step_ms'] / row['scan_step_ms']:.2f}x of {limit:.2f}x "
            f"| {row['cudnn_step_ms'] / row['parallel_step_ms']:.2f}x "
            f"| {row['notes']['automatic'].split(':')[0].removeprefix('backward by ')}, "
            f"{row['cudnn_step_ms'] / row['automatic_step_ms']:.2f}x |"
        )
    return "\n".join(lines)
