"""What differs when gradients of a 3-D U-Net under a bitwise plan are not those of plain training.

    python benchmarks/within-repeats/run.py --out DIR [--processes 8] [--seconds 300] [--device cpu]

A 3-D U-Net (instance norms, biases before them, bf16 autocast, `cudnn.benchmark`) gave 17 of 78 gradients equal in one
process and 78 of 78 in six others. Each process here trains the network three ways and compares every gradient of each
with the first one: plain training, twice; under `outcore.within` at half of plain's reserved memory, twice. It records
which kernels ran in each (torch's profiler, names and counts), how often cuDNN was refused a workspace or the allocator
had to look again, and, for the parameters that differ, by how much. If plain differs from plain, or kernels differ
where gradients do, the plan is not to blame; `what` in a row says which.

The orders of a process rotate: plain first; plan first; plan first under a hard limit of the allocator at its budget,
in which cuDNN's search can be refused a workspace and remember another algorithm for the rest of the process; and
cuDNN's search switched off.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

from benchmarks.frontier.networks import UNet3d, loss_of  # noqa: E402

ORDERS = ("plain first", "plan first", "plan first, limited", "no search")


def kernels(step: Any, device: str) -> dict[str, int]:
    """The kernels of a step, by name."""
    from torch.profiler import ProfilerActivity, profile

    if device != "cuda":
        step()
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    counted: collections.Counter[str] = collections.Counter()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            counted[event.name] += 1
    return dict(counted)


def compared(found: dict[str, torch.Tensor], first: dict[str, torch.Tensor]) -> dict[str, Any]:
    """How many gradients are equal, and by how much the others differ, of the parameter's own largest."""
    differ = {}
    for name, want in first.items():
        if not torch.equal(found[name], want):
            scale = float(want.abs().max()) or 1.0
            differ[name] = [float((found[name].double() - want.double()).abs().max()) / scale, scale]
    return {"equal": len(first) - len(differ), "of": len(first), "differ": differ}


def other_kernels(a: dict[str, int], b: dict[str, int]) -> dict[str, list[int]]:
    """Convolution kernels whose counts differ: a plan computes other things again, but never by another algorithm."""
    words = ("conv", "gemm", "cudnn", "wgrad", "dgrad", "implicit", "xmma", "cutlass", "nchw", "nhwc")
    names = {name for name in (*a, *b) if any(word in name.lower() for word in words)}
    return {n: [a.get(n, 0), b.get(n, 0)] for n in sorted(names) if (n in a) != (n in b)}


def digest(tensor: torch.Tensor) -> str:
    """Of its bytes, to compare processes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def between(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What differs between processes: gradients of plain training, and its convolution kernels."""
    done = [row for row in rows if "digests" in row and row["order"] != "no search"]
    if len(done) < 2:
        return {}
    names = done[0]["digests"]["plain"]
    differ = [n for n in names if len({row["digests"]["plain"][n] for row in done}) > 1]
    other = {n for row in done[1:] for n in other_kernels(done[0]["kernels"]["plain"], row["kernels"]["plain"])}
    return {"processes": len(done), "gradients": len(names), "differ": differ, "other_kernels": sorted(other)}


def trouble() -> list[int]:
    if not torch.cuda.is_available():
        return [0, 0]
    counted = torch.cuda.memory_stats()
    return [counted["num_alloc_retries"], counted["num_ooms"]]


def one(index: int, given: argparse.Namespace, pipe: Any) -> None:
    """A process."""
    order = ORDERS[index % len(ORDERS)]
    row: dict[str, Any] = {"process": index, "order": order}
    try:
        _one(row, order, given)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    pipe.send(row)


def _one(row: dict[str, Any], order: str, given: argparse.Namespace) -> None:
    import outcore

    warnings.simplefilter("ignore")
    os.environ["OUTCORE_CACHE"] = str(given.out / "caches" / str(row["process"]))
    device = given.device
    torch.backends.cudnn.benchmark = order != "no search"
    torch.manual_seed(0)
    model = UNet3d(given.width).to(device).train()
    x = torch.randn(given.batch, 1, *[given.side] * 3, device=device)
    state = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)
    ways: dict[str, tuple[dict[str, torch.Tensor], dict[str, int]]] = {}

    def forward_backward() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            out = model(x)
        loss_of(out).backward()

    def taken(name: str) -> None:
        """Gradients and kernels of a step that is not the first."""
        before = trouble()
        for _ in range(given.warm):
            forward_backward()
            optimizer.step()
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                tensor.copy_(state[key])
        ran = kernels(forward_backward, device)
        gradients = {n: p.grad.detach().cpu() for n, p in model.named_parameters() if p.grad is not None}
        ways[name] = gradients, ran
        row.setdefault("trouble", {})[name] = [now - then for now, then in zip(trouble(), before, strict=True)]

    def plain(name: str) -> None:
        outcore.release(model)
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        taken(name)
        if device == "cuda":
            row.setdefault("plain_reserved", torch.cuda.max_memory_reserved())

    def plan(name: str) -> None:
        outcore.release(model)
        if device == "cuda":
            torch.cuda.empty_cache()
        share: int | str = f"{given.share:.0%}"
        if device == "cuda":
            share = int(given.share * (given.plain_gib * 2**30 if given.plain_gib else row.get("plain_reserved", 0)))
        if "limited" in order and device == "cuda" and share:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(share / total)
        with torch.autocast(device, torch.bfloat16):
            outcore.within(
                model, (x,), memory=share or f"{given.share:.0%}", loss=loss_of, optimizer=optimizer, quiet=True
            )
        taken(name)

    steps = [("plain", plain), ("plain again", plain), ("plan", plan), ("plan again", plan)]
    if order.startswith("plan first"):
        steps = [("plan", plan), ("plain", plain), ("plan again", plan), ("plain again", plain)]
    for name, take in steps:
        take(name)
    first, its_kernels = ways["plain"]
    row["against_plain"] = {name: compared(found, first) for name, (found, _) in ways.items() if name != "plain"}
    row["plan_against_plan"] = compared(ways["plan again"][0], ways["plan"][0])
    row["other_kernels"] = {n: other_kernels(its_kernels, ran) for n, (_, ran) in ways.items() if n != "plain"}
    row["kernels"] = {name: ran for name, (_, ran) in ways.items()}
    row["digests"] = {name: {n: digest(g) for n, g in found.items()} for name, (found, _) in ways.items()}
    row["what"] = said(row)


def said(row: dict[str, Any]) -> str:
    """What differed, in a sentence."""
    plain, plan = row["against_plain"]["plain again"], row["against_plain"]["plan"]
    if plain["equal"] == plain["of"] == plan["equal"]:
        return "nothing differs"
    if plain["equal"] < plain["of"]:
        names = set(plan["differ"]) - set(plain["differ"])
        also = f", and the plan in {len(names)} others" if names else ", and the plan in no other"
        return f"plain differs from plain in {len(plain['differ'])} gradients{also}"
    if row["other_kernels"]["plan"]:
        return f"the plan ran other kernels: {list(row['other_kernels']['plan'])[:4]}"
    if any(map(any, row["trouble"].values())):
        return "the same kernels, but memory was refused"
    return "the same kernels ran, and the plan differs"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--beside", type=int, default=1, help="so many processes at a time")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--plain-gib", type=float, default=0.0, help="what plain training reserves, where it is known")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    end, rows, found = time.monotonic() + given.seconds, [], {}
    context = multiprocessing.get_context("spawn")
    for begin in range(0, given.processes, given.beside):
        if time.monotonic() > end:
            break
        running = []
        for index in range(begin, min(begin + given.beside, given.processes)):
            here, there = context.Pipe()
            process = context.Process(target=one, args=(index, given, there))
            process.start()
            there.close()
            running.append((index, here, process))
        for index, here, process in running:
            try:
                row = here.recv() if here.poll(max(1.0, end - time.monotonic())) else {"error": "not finished"}
            except EOFError:
                row = {"error": "the process ended"}
            process.join(3)
            process.kill()
            rows.append({"process": index} | row)
            counts = {name: f"{c['equal']}/{c['of']}" for name, c in row.get("against_plain", {}).items()}
            print(index, row.get("order"), counts, row.get("what"), row.get("error", ""), flush=True)
        facts = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "given": vars(given) | {"out": ""}}
        facts["device"] = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["between_processes"] = found = between(rows)
        (given.out / "repeats.json").write_text(json.dumps(facts | {"rows": rows}, indent=1, default=str))
    print("plain training between processes:", {k: v if isinstance(v, int) else len(v) for k, v in found.items()})


if __name__ == "__main__":
    main()
