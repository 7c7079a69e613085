"""Scan against cuDNN: backward pass and whole training step over length, hidden size and batch.

python benchmarks/rnn-scan/run.py --out results/            # everything, about five minutes on an H200
python benchmarks/rnn-scan/run.py --out results/ --quick    # correctness and a few points, one minute
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import outcore.scan as scan
from outcore.scan import Newton, Options
from outcore.scan.choice import choices

CLASSES = 10


@dataclass(frozen=True)
class Setting:
    """One row: a classifier on the last hidden state, as in the paper."""

    cell: str
    steps: int
    batch: int
    hidden: int
    inputs: int = 1
    every_step: bool = False


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


class Classifier(nn.Module):
    """A recurrent layer and a linear one on its last output, or on the mean of all."""

    def __init__(self, layer: nn.Module, hidden: int, every_step: bool) -> None:
        super().__init__()
        self.layer, self.head, self.every_step = layer, nn.Linear(hidden, CLASSES), every_step

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.layer(x)
        return self.head(output.mean(0) if self.every_step else output[-1])


def make(setting: Setting, options: Options | None, device: str) -> Classifier:
    torch.manual_seed(0)
    kind = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}[setting.cell]
    layer = kind(setting.inputs, setting.hidden)
    if options is not None:
        scan.convert(layer, options=options)
    return Classifier(layer, setting.hidden, setting.every_step).to(device)


def data(setting: Setting, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bit streams whose density tells the class; for more than one input, noise on top of it."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (setting.batch,), generator=generator)
    density = 0.05 + 0.9 * label / (CLASSES - 1)
    x = (torch.rand(setting.steps, setting.batch, setting.inputs, generator=generator) < density[:, None]).float()
    if setting.inputs > 1:
        x += 0.3 * torch.randn(x.shape, generator=generator)
    return x.to(device), label.to(device)


def milliseconds(run: Callable[[], Any], repeats: int, before: Callable[[], Any] | None = None) -> float:
    """Median over repeats of the time on the device; `before` runs untimed."""
    found = []
    for i in range(repeats + 1):
        given = before() if before else None
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(given) if before else run()  # type: ignore[call-arg]
        end.record()
        torch.cuda.synchronize()
        if i:
            found.append(start.elapsed_time(end))
    return statistics.median(found)


def device_milliseconds(run: Callable[[], Any]) -> float:
    """Time the device was busy, without the gaps in which it waited for the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


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


def graphed(setting: Setting, log: Callable[[str], None]) -> dict[str, Any]:
    """Forward, and forward with backward, each recorded in a CUDA graph, so that the host is out of the way."""
    found: dict[str, Any] = {"setting": asdict(setting)}
    for name, options in (("cudnn", None), ("scan", Options(backward="scan"))):
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
            found[f"{name}_{part}_ms"] = milliseconds(graph.replay, 7)
        found[f"{name}_error"] = max(
            float((a - b).abs().max() / a.abs().max()) for a, b in zip(plain, kept, strict=True)
        )
    forward_ms, cudnn, scanned = found["cudnn_forward_ms"], found["cudnn_both_ms"], found["scan_both_ms"]
    found["backward_faster"] = (cudnn - forward_ms) / (scanned - found["scan_forward_ms"])
    found["step_faster"], found["amdahl"] = cudnn / scanned, cudnn / forward_ms
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


def bound(row: Row) -> float:
    """What Amdahl allows when only the backward pass gets faster."""
    return (row.cudnn_forward_ms + row.cudnn_backward_ms) / row.cudnn_forward_ms


def correctness(log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every gradient against torch.nn in float64 on the same GPU, relative to the largest of its tensor."""
    found = []
    torch.backends.cudnn.allow_tf32 = False  # torch's own forward pass would be off by 1e-3
    packed = {"bidirectional": True, "num_layers": 2, "packed": True}
    ways = ((None, None), ("products", None), (None, Newton()))
    for kind, extra in (("RNN", {}), ("RNN", {"nonlinearity": "relu"}), ("GRU", {}), ("LSTM", {})):
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


def settings(quick: bool) -> list[Setting]:
    if quick:
        return [Setting("RNN", T, 16, 20) for T in (100, 1000, 10000)] + [Setting("GRU", 3000, 16, 20, 20)]
    return [
        *(Setting("RNN", T, 16, 20) for T in (10, 30, 100, 300, 1000, 3000, 10000, 30000)),
        *(Setting("RNN", T, 16, 20, every_step=True) for T in (1000, 30000)),
        *(Setting("GRU", T, N, 20, 20) for T in (300, 3000) for N in (16, 64)),
        Setting("GRU", 30000, 16, 20, 20),
        *(Setting("LSTM", T, 16, 20, 20) for T in (300, 3000, 30000)),
        *(Setting("RNN", 3000, N, 20) for N in (2, 64, 256)),
        *(Setting("RNN", 3000, 16, H) for H in (8, 64, 128, 256, 512)),
        *(Setting("GRU", 3000, 16, H, 20) for H in (64, 128, 256)),
        *(Setting("LSTM", 3000, 16, H, 20) for H in (64, 256)),
    ]


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


def environment() -> dict[str, Any]:
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--part",
        choices=["long", "rest", "graphs"],
        help="only the longest sequences, all but correctness, or CUDA graphs",
    )
    parser.add_argument("--seconds", type=float, default=360, help="stop starting new rows after this long")
    parser.add_argument("--table", nargs="+", type=Path, metavar="JSON", help="only print the table of result files")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    began = time.perf_counter()

    def log(line: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f}s] {line}", flush=True)

    result: dict[str, Any] = {"environment": environment(), "quick": args.quick}
    path = (
        args.out / f"{datetime.date.today()}{'-quick' if args.quick else ''}{f'-{args.part}' if args.part else ''}.json"
    )
    args.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        result["choices"] = {key: asdict(timing) for key, timing in choices.timings.items()}
        path.write_text(json.dumps(result, indent=1) + "\n")

    log(str(result["environment"]))
    if args.part == "graphs":
        result |= {"graphs": [], "chunks": []}
        for setting in settings(False):
            if setting.steps == 30000:
                for name, look in (("graphs", graphed), ("chunks", chunk_lengths)):
                    try:
                        found = look(setting, log)
                        result[name] += found if isinstance(found, list) else [found]
                    except Exception as error:
                        log(f"FAILED {name} {setting}: {type(error).__name__}: {error}")
                        result[name].append(asdict(setting) | {"failed": str(error)[:300]})
                    save()
        return
    if args.part is None:
        result["correctness"] = correctness(log)
        save()
    result["memory"] = memory(log)
    result["training"] = [training_curve(30 if args.quick else 300, 1000, lr, log) for lr in (1e-5, 3e-4)]
    save()
    result["rows"] = []
    for setting in settings(args.quick):
        if args.part == "long" and setting.steps < 30000 and setting.hidden != 256:
            continue
        if time.perf_counter() - began > args.seconds:
            log(f"out of time before {setting}")
            continue
        try:
            result["rows"].append(asdict(measure(setting, 3 if setting.steps > 5000 else 7, log)))
        except Exception as error:
            log(f"FAILED {setting}: {type(error).__name__}: {error}")
            result["rows"].append(asdict(setting) | {"failed": str(error)})
        save()


if __name__ == "__main__":
    main()
