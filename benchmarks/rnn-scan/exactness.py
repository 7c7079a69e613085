"""Whether it is exact: gradients against float64, the training curve, memory against its prediction."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from setting import Setting, data, make
from torch import nn

import outcore.scan as scan
from outcore.scan import Newton, Options


def correctness(log: Callable[[str], None], cell: str | None = None) -> list[dict[str, Any]]:
    """Every gradient against torch.nn in float64 on the same GPU, relative to the largest of its tensor."""
    found = []
    torch.backends.cudnn.allow_tf32 = False  # torch's own forward pass would be off by 1e-3
    packed = {"bidirectional": True, "num_layers": 2, "packed": True}
    ways = ((None, None), ("products", None), (None, Newton()))
    for kind, extra in (("RNN", {}), ("RNN", {"nonlinearity": "relu"}), ("GRU", {}), ("LSTM", {})):
        if cell not in (None, kind):
            continue
        cases = [(torch.float64, 777, 20, packed), (torch.float32, 777, 20, {}), (torch.float32, 1, 20, {})]
        if not extra:
            cases += [(torch.float32, 200, 300, {}), (torch.float32, 300, 20, packed)]
        if kind == "GRU":
            cases += [(torch.float32, 300, 64, {})]
        for dtype, T, hidden, more in cases:
            for solver, newton in ways:
                found.append(compare(kind, extra | more, dtype, T, hidden, solver, newton))
                if not found[-1]["error"] < (1e-9 if dtype == torch.float64 else 1e-4):
                    log(f"WRONG: {found[-1]}")
    torch.backends.cudnn.allow_tf32 = True
    for dtype in (torch.float64, torch.float32):
        worst = max((f for f in found if f["dtype"] == str(dtype)), key=lambda f: f["error"])
        log(f"worst of {len(found)} comparisons, {dtype}: {worst}")
    return found


def compare(
    kind: str, given: dict[str, Any], dtype: torch.dtype, T: int, hidden: int, solver: Any, newton: Any
) -> dict[str, Any]:
    options = dict(given)
    packed = options.pop("packed", False)
    torch.manual_seed(1)
    reference = getattr(nn, kind)(5, hidden, **options).double().cuda()
    ours = getattr(scan, kind)(5, hidden, **options).to(dtype).cuda()
    ours.load_state_dict(reference.state_dict())
    ours.options = Options(backward="scan", solver=solver, forward=newton)
    x = torch.randn(T, 3, 5, dtype=torch.float64, device="cuda")
    grads = []
    for module in (reference, ours):
        data = x.to(next(module.parameters()).dtype).requires_grad_()
        inputs = data
        if packed:
            inputs = nn.utils.rnn.pack_padded_sequence(data, [T // 2, T, T - 1], enforce_sorted=False)
        output, state = module(inputs)
        output = output.data if packed else output
        last = state if isinstance(state, tuple) else (state,)
        torch.manual_seed(2)
        weight = torch.randn(output.shape, dtype=torch.float64, device="cuda").to(output.dtype)
        total = (output * weight).sum() + sum(part.square().sum() for part in last)
        grads.append([output, *torch.autograd.grad(total, [data, *module.parameters()])])
    error = max(float(((a - b).abs().max() / a.abs().max()).detach()) for a, b in zip(*grads, strict=True))
    layer = ours.report.layers[0]
    return {
        "cell": kind, **given, "dtype": str(dtype), "steps": T, "hidden": hidden, "asked": str(solver),
        "newton": newton is not None, "error": error, "solvers": layer.solvers, "engine": layer.engine,
        "iterations": layer.iterations, "fell_back": layer.fell_back,
    }  # fmt: skip


def training_curve(steps: int, length: int, lr: float, log: Callable[[str], None]) -> dict[str, Any]:
    """The paper's figure: loss over training, scan against cuDNN, from the same start on the same data."""
    setting = Setting("RNN", length, 16, 20)
    curves: dict[str, list[float]] = {}
    seconds = {}
    for name, options in (
        ("cudnn", None),
        ("scan", Options(backward="scan", solver="products")),
        ("parallel", Options(backward="scan", forward=Newton())),
    ):
        model = make(setting, options, "cuda")
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        losses = []
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(steps):
            x, label = data(setting, "cuda", seed=i)
            loss = nn.functional.cross_entropy(model(x), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        curves[name] = torch.stack(losses).tolist()
        seconds[name] = time.perf_counter() - began
    gaps = {
        name: max(abs(a - b) for a, b in zip(curves["cudnn"], curves[name], strict=True))
        for name in ("scan", "parallel")
    }
    log(f"training curve over {steps} steps: largest gap of the loss {gaps}, seconds {seconds}")
    return {"setting": asdict(setting), "lr": lr, "curves": curves, "seconds": seconds, "gaps": gaps}


def memory(log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Predicted workspace against the measured peak of the backward pass."""
    rows = []
    for cell, T, hidden, limit in (
        ("RNN", 30000, 20, None),
        ("GRU", 10000, 20, None),
        ("LSTM", 10000, 20, None),
        ("GRU", 3000, 64, None),
        ("GRU", 10000, 20, "100MiB"),
        ("LSTM", 10000, 20, "200MiB"),
        ("RNN", 3000, 256, None),
    ):
        setting = Setting(cell, T, 16, hidden, inputs=20)
        model = make(setting, Options(backward="scan", solver="products", memory=limit), "cuda")
        x, _ = data(setting, "cuda")
        for _ in range(2):
            output, _ = model.layer(x.requires_grad_())
            gradient = torch.ones_like(output)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            grads = torch.autograd.grad(output, [x, *model.layer.parameters()], gradient)
            torch.cuda.synchronize()
            used = torch.cuda.max_memory_allocated() - held
            del grads
        predicted = model.layer.report.layers[0].predicted_bytes
        rows.append(asdict(setting) | {"limit": limit, "predicted": predicted, "measured": used})
        log(f"memory {cell} T {T} H {hidden} limit {limit}: predicted {predicted:,}, measured {used:,}")
    return rows
