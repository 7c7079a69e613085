"""In which order should buckets leave? Plain training and several orders of AlexNet's trips, in turn, in one process.

    python benchmarks/offload-parameters/orders.py --out results/

Every order trains a copy of the same network on the same batches; rounds are timed as in `run.py`, weights compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from run import MODELS, Row, link, network, pictures, trace

from outcore.memory.offload.copy_streams import CopyStreams
from outcore.memory.param_offload import writeback
from outcore.memory.param_offload.writeback import Writeback, Writebacks
from outcore.memory.saved_tensors.managed_forward import ManagedForward

MIB = 2**20


class Following(Writebacks):
    """The first bucket leaves when it was updated, and what others owe follows it in one graph."""

    def __init__(self, buckets: Any, copy_streams: CopyStreams) -> None:
        super().__init__(buckets, copy_streams)
        (first, *others), size = list(self.parts), writeback._PIECE_BYTES
        for bucket in others:
            whole = writeback.WritebackPart(bucket.weights, 0, bucket.weights.bytes)
            self.parts[bucket] = whole.split(int(0.55 * whole.end), least=writeback._HALVED_BYTES)
        self.after_update = {bucket: Writeback(self.parts[bucket][:1], copy_streams, size) for bucket in others}
        rest = [part for bucket in others for part in self.parts[bucket][1:]]
        self.after_update[first], self.delayed = Writeback([*self.parts[first], *rest], copy_streams, size), None


class Apart(Writebacks):
    """Every part is a graph of its own."""

    def _start(self, started: Writeback) -> Any:
        pending = [part for part in started.parts if part.pending]
        for part in pending:
            if part not in self.single_parts:
                self.single_parts[part] = Writeback([part], self.copy_streams, started.piece_bytes)
            self.single_parts[part].start()
        return list(dict.fromkeys(part.flat_buffer for part in pending))


ORDERS: dict[str, tuple[Callable[..., Writebacks], dict[str, float]]] = {
    "as it is": (Writebacks, {}),
    "nothing beside the first bucket": (Writebacks, {"_BESIDE_BYTES": 2**40}),
    "20 MiB beside the first bucket": (Writebacks, {"_BESIDE_BYTES": 20 * MIB}),
    "pieces of 6 MiB": (Writebacks, {"_PIECE_BYTES": 6 * MIB}),
    "pieces of 10 MiB": (Writebacks, {"_PIECE_BYTES": 10 * MIB}),
    "pieces of 24 MiB": (Writebacks, {"_PIECE_BYTES": 24 * MIB}),
    "pieces of 36 MiB": (Writebacks, {"_PIECE_BYTES": 36 * MIB}),
    "every part a graph": (Apart, {}),
    "the first bucket with its update": (Following, {}),
}


@contextlib.contextmanager
def changed(values: dict[str, float]) -> Iterator[None]:
    before = {name: getattr(writeback, name) for name in values}
    for name, value in values.items():
        setattr(writeback, name, value)
    yield
    for name, value in before.items():
        setattr(writeback, name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.backends.cuda.is_built() else "cpu")
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--orders", nargs="*", default=list(ORDERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-s", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=0)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--name", default="orders")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.backends.cudnn.deterministic = True
    device = torch.device(options.device)
    model = network(options.model, device).train()
    side = options.side or MODELS[options.model]
    data = [pictures(n, side, seed, device) for seed, n in ((1, 8 * options.batch), (2, 64))]
    rows: dict[str, Row] = {}
    document: dict[str, Any] = {"model": options.model, "torch": torch.__version__, "orders": {}}
    for name in ("plain", *options.orders):
        rows[name] = row = Row("baseline" if name == "plain" else "outcore", model, *data, options.batch)
        if name != "plain":
            managed_forward = row.model.__dict__["forward"]
            assert isinstance(managed_forward, ManagedForward) and managed_forward.keeper is not None
            kind, values = ORDERS[name]
            with changed(values):
                managed_forward.keeper.writebacks = kind(
                    managed_forward.keeper.buckets, managed_forward.keeper.copy_streams
                )
        row.train(8)
    weights = {name: row.weights() for name, row in rows.items()}
    document["link"] = link(4 * sum(p.numel() for p in model.parameters()), device)
    steps = max(8, int(options.round_s / (rows["plain"].train(8) / 8)))
    for i in range(options.rounds):
        for row in list(rows.values())[:: 1 if i % 2 == 0 else -1]:
            row.round(steps)
        for name, row in rows.items():
            equal = all(torch.equal(weights[name][k], v) for k, v in weights["plain"].items())
            earlier = document["orders"].get(name, {}).get("issue_s", [])
            found = {"rounds_s": row.rounds_s, "weights_equal": equal, "issue_s": [*earlier, issue_s(row)]}
            document["orders"][name] = found
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / f"{time.strftime('%Y-%m-%d')}-{options.name}-{options.model}.json"
            path.write_text(json.dumps(document, indent=1) + "\n")
    bound = max(statistics.median(rows["plain"].rounds_s), document["link"].get("both_s", 0.0))
    for name, found in document["orders"].items():
        step_s, least = statistics.median(found["rounds_s"]), min(found["rounds_s"])
        print(
            f"{options.model} {name:32} {1e3 * step_s:7.2f} ms, least {1e3 * least:7.2f}, {step_s / bound:5.2f}x, "
            f"host alone {1e3 * statistics.median(found['issue_s']):.2f} ms, equal {found['weights_equal']}",
            flush=True,
        )
    if options.trace and options.out is not None:
        trace(rows[options.orders[0]], options.out / f"{time.strftime('%Y-%m-%d')}-{options.name}.trace.json.gz")


def issue_s(row: Row) -> float:
    """Seconds that the host takes for a step while the device has nothing else to do."""
    found = []
    for _ in range(3):
        if row.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        row.way.step(*row.batches[0])
        found.append(time.perf_counter() - start)
    row.steps += 3
    return min(found)


if __name__ == "__main__":
    main()
