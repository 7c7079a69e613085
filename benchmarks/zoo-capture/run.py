"""Capture every model of the zoo; beside it torch.fx and torch.export, in the same process.

    python benchmarks/zoo-capture/run.py            (from the root of the repository: it uses tests/foreign)

Replay is checked bitwise (outputs, gradients, buffers) in train mode; the test-suite checks the other modes. The peers
only have to return a graph.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import logging
import platform
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import outcore
from tests.foreign.foreign import Foreign
from tests.foreign.zoo import QUICK, ZOO
from tests.graph.replay import assert_same, run

HERE = Path(__file__).parent


def timed(action: Callable[[], Any]) -> tuple[float, str]:
    """Seconds an action took, and how it failed."""
    start, failure = time.perf_counter(), ""
    try:
        action()
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    return time.perf_counter() - start, failure


def seeded(foreign: Foreign) -> torch.nn.Module:
    torch.manual_seed(0)
    return foreign.build().train()


def without_cache(model: torch.nn.Module) -> torch.nn.Module:
    """A language model as one would export it: it returns no cache of keys and values."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return model


def one(foreign: Foreign, *, peers: bool) -> dict[str, Any]:
    model, plain = seeded(foreign), seeded(foreign)
    args, kwargs = foreign.inputs(2)
    start = time.perf_counter()
    graph = outcore.capture(model, args, kwargs)
    row: dict[str, Any] = {"model": foreign.name, "seconds": time.perf_counter() - start, "calls": len(graph.calls)}
    row["blocks"], row["notes"] = len(graph.blocks), list(graph.notes)
    _, row["replay"] = timed(
        lambda: assert_same(run(plain, args, kwargs, plain), run(graph.module, args, kwargs, model))
    )
    if peers:
        row["fx_seconds"], row["fx"] = timed(lambda: torch.fx.symbolic_trace(plain))
        alike = without_cache(seeded(foreign))
        row["export_seconds"], row["export"] = timed(lambda: torch.export.export(alike, args, kwargs, strict=False))
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| model | calls | capture s | replay | torch.export s | torch.fx |", "|---|---:|---:|---|---:|---|"]
    for r in rows:
        export = "failed" if r.get("export") else f"{r['export_seconds']:.2f}" if "export" in r else "·"
        fx = "failed" if r.get("fx") else "ok" if "fx" in r else "·"
        real = " (on real data)" if r.get("notes") else ""
        replay = r.get("failure") or r.get("replay") or f"bitwise{real}"
        lines.append(
            f"| {r['model']} | {r.get('calls', '·')} | {r.get('seconds', 0):.2f} | {replay} | {export} | {fx} |"
        )
    good = [r for r in rows if "calls" in r]
    lines += [
        "",
        f"{sum(not r['replay'] for r in good)} of {len(rows)} captured and replayed bitwise; median capture "
        f"{statistics.median(r['seconds'] for r in good):.2f} s, largest {max(r['seconds'] for r in good):.2f} s.",
    ]
    if any("export" in r for r in good):
        exported = [r["export_seconds"] for r in good if not r.get("export")]
        traced = sum(not r.get("fx") for r in good)
        lines[-1] += (
            f" torch.export returned a graph for {len(exported)}, median {statistics.median(exported):.2f} s; "
            f"torch.fx for {traced}."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the quick models")
    parser.add_argument("--no-peers", action="store_true", help="leave out torch.fx and torch.export")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--out", type=Path, default=HERE / f"{datetime.date.today()}.json")
    parser.add_argument("--table", type=Path, help="print the table of a result and stop")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]))
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rows = []
    for foreign in QUICK if options.quick else ZOO:
        if options.only not in foreign.name:
            continue
        try:
            rows.append(one(foreign, peers=not options.no_peers))
        except Exception as error:
            rows.append({"model": foreign.name, "failure": f"{type(error).__name__}: {error}"[:200]})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        gc.collect()
    environment = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "peak_rss_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    options.out.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
