"""Predicted beside measured times of compiled steps, without a GPU: networks are traced as fake tensors.

    python benchmarks/within-compiled/predicted_times.py [--out FILE] [--processes 4] [--only resnet50,gpt]
        [--sizes large,batch]

What is measured are steps of torch.compile on an H200 that were stored: of `benchmarks/within-frontier` (large images;
SGD) and `benchmarks/frontier` at its own activation memory budgets, and of this benchmark at 1.0 (batches of small
images, in which the host takes as long as the device). For each, the joint graph is cut as torch would cut it for that
budget, and its time predicted from the catalogue and the shipped calibration alone, once as kernels that each read for
themselves and once with the traffic that kernels share; with the host's part, and without. Prints a line for each, with
the saved bytes by type of number (what encodings could make smaller), and the median and largest errors.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
RESULTS = ROOT / "benchmarks"
DEVICE = "h200"


@dataclass(frozen=True)
class Measured:
    """A stored row."""

    network: str
    bf16: bool
    budget: float
    """Of torch.compile."""
    ms: float
    source: str
    size: str = "large"


def stored() -> list[Measured]:
    """The rows that there are."""
    found: dict[Any, Measured] = {}
    for path in sorted((RESULTS / "within-frontier" / "results").glob("*.json")):
        for row in json.loads(path.read_text()).get("rows", []):
            how = str(row.get("how", ""))
            if how.startswith("compile budget") and "ms" in row and row.get("side") == 4096:
                key = row["model"], "bf16" in row["precision"], float(how.split()[-1])
                found[key] = Measured(*key, row["ms"], path.name)
    for path in sorted((RESULTS / "frontier" / "results").rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row.get("size") == "large" and str(row.get("way", "")).startswith("compile 0") and "ms" in row:
                key = row["network"], row["precision"] == "bf16", float(row["way"].split()[1])
                found[key] = Measured(*key, row["ms"], path.name)
            elif row.get("size") == "large" and row.get("way") == "compile 1.0" and "ms" in row:
                key = row["network"], row["precision"] == "bf16", 1.0
                found[key] = Measured(*key, row["ms"], path.name)
    for path in sorted((RESULTS / "within-compiled" / "results").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row.get("way") == "compile 1.0" and "ms" in row:
                key = row["network"], row["precision"] == "bf16", 1.0
                found[key, row["size"]] = Measured(*key, row["ms"], path.name, row["size"])
    return list(found.values())


def rates_of(name: str) -> Any:
    """The rates of a device of the catalogue."""
    import torch

    from outcore.compiled.joint_graph import _EFFICIENCY, Rates
    from outcore.cost.measured.in_network_ratio import STREAMED
    from outcore.machine.catalogue import find

    device = find(name).device
    names = {torch.float32: "tf32", torch.bfloat16: "bf16"}
    flops = {kind: _EFFICIENCY * device.rate(rate) for kind, rate in names.items()}
    return Rates(STREAMED * device.bandwidth_bytes_per_s, flops, device.launch_s, None, device, device.dispatch_s)


def predict(network: str, size: str, bf16: bool, budgets: Sequence[float]) -> dict[float, dict[str, Any]]:
    """By torch.compile's budget, milliseconds and bytes of a step, with that of SGD with momentum."""
    import torch
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor import lowering  # noqa: F401  (its decompositions ask for it)
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.frontier.networks import NETWORKS, Cast, loss_of, ordered
    from outcore.compiled.joint_graph import JointGraph
    from outcore.compiled.lifetimes import step_of
    from outcore.compiled.times.host_times import host_and_device_s
    from outcore.compiled.torch_partitioner import Partitioner, SavedChoice, TracedStep

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    rates = rates_of(DEVICE)
    found: dict[float, dict[str, Any]] = {}

    def choose(partition: TracedStep) -> SavedChoice:
        graph = JointGraph(partition, rates)
        library = 1e3 * sum(graph.seconds)
        elements = graph.elements
        for budget in budgets:
            saved = [graph.index[node] for node in partition.torch_choice(budget)]
            step = step_of(graph, saved)
            graph.elements = list(range(len(graph.nodes)))  # no two kernels have the same size: none is shared
            alone = step_of(graph, saved)
            graph.elements = elements
            update_s = 5 * sum(p.nbytes for p in model.parameters()) / rates.bytes_per_s
            device_s = step.device_s + update_s
            found[budget] = {"ms": 1e3 * host_and_device_s(step.host_s, device_s), "library": library}
            found[budget] |= {"not shared": 1e3 * host_and_device_s(alone.host_s, alone.device_s + update_s)}
            found[budget] |= {"host": 1e3 * step.host_s, "without the host": 1e3 * device_s}
            kinds: dict[str, int] = {}
            for number in {graph.source[i] for i in step.saved}:
                value = graph.nodes[number].meta.get("val")
                kind = str(value.dtype) if isinstance(value, torch.Tensor) else "several"
                kinds[kind] = kinds.get(kind, 0) + graph.bytes[number]
            found[budget] |= {"peak_bytes": step.peak_bytes, "nodes": len(graph.nodes), "saved": kinds}
        return SavedChoice(partition.torch_choice(1.0))

    described = NETWORKS[network]
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as patches:
        same = patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
        patches.enter_context(same)  # it draws until no number is too large, which fake ones cannot tell
        if described.words:  # whether masks can be left out is not asked of fake numbers, as under torch.compile
            from transformers import masking_utils

            patches.enter_context(patch.object(masking_utils, "is_tracing", lambda *_: True, create=True))
        torch.manual_seed(0)
        model = Cast(described.build(size), bf16).train()
        last = described.has_layouts
        for parameter in model.parameters():
            if parameter.dim() in (4, 5):
                parameter.data = ordered(parameter.data, last)
        args, kwargs = described.batch(size, "cpu", last)
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        run = aot_function(
            lambda tensors, args, kwargs: torch.func.functional_call(model, tensors, args, kwargs),
            fw_compiler=lambda graph, _: graph.forward,
            bw_compiler=lambda graph, _: graph.forward,
            partition_fn=Partitioner(choose),
            decompositions=select_decomp_table(),
        )
        loss_of(run(tensors, args, kwargs)).backward()
    return found


def one(network: str, size: str, bf16: bool, rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """Predictions of one network beside its rows."""
    begin = time.perf_counter()
    try:
        found = predict(network, size, bf16, [row.budget for row in rows])
    except Exception as error:  # what failed is a result too
        return [
            {"network": network, "size": size, "bf16": bf16, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        ]
    taken = round(time.perf_counter() - begin, 1)
    facts = {"network": network, "size": size, "bf16": bf16, "took_s": taken}
    return [
        facts | {"budget": row.budget, "measured_ms": row.ms, "source": row.source} | found[row.budget] for row in rows
    ]


def main() -> None:
    """Predict all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--sizes", default="large,batch")
    given = parser.parse_args()
    cases: dict[tuple[str, str, bool], list[Measured]] = {}
    for row in stored():
        if row.size in given.sizes.split(",") and (not given.only or row.network in given.only.split(",")):
            cases.setdefault((row.network, row.size, row.bf16), []).append(row)
    context = multiprocessing.get_context("spawn")
    found: list[dict[str, Any]] = []
    with concurrent.futures.ProcessPoolExecutor(given.processes, mp_context=context) as pool:
        waiting = [pool.submit(one, *case, rows) for case, rows in cases.items()]
        for future in concurrent.futures.as_completed(waiting):
            for row in future.result():
                found.append(row)
                print(json.dumps(row), flush=True)
                if given.out is not None:
                    with given.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    for name in ("ms", "not shared", "without the host"):
        errors = [abs(row[name] / row["measured_ms"] - 1) for row in found if name in row]
        if errors:
            print(
                f"{name}: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}, {len(errors)} rows"
            )


if __name__ == "__main__":
    main()
