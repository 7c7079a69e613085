"""What encodings alone save, per network, in memory, time and gradients: Gist's own question.

    python benchmarks/gist-encodings/run.py --out results/2026-11-16-h200.json --effects

Gist (Jain et al., ISCA 2018) holds what backward needs in fewer bits between forward and backward: up to 2x less memory
without loss at 4 % more time, beyond 4x with loss. Here every buffer that has an exact smaller form gets it (lossless:
signs of ReLU outputs, positions in pool windows, masks as bits), then the outputs of ReLU as bitmap and values too
("sparse"), then everything that is left as half, or 8 or 4 bits in groups (lossy, with what that does to the
gradients). Nothing is moved, and nothing recomputed but under "again", which is exact too: beside the smaller forms,
what a norm, a ReLU, a sum or a `cat` made comes from what they were made of.

A process per network prepares beside the others and measures alone (`benchmarks/gate.py`). All ways of a network take
turns, a few steps each, and a ratio is the median of those within a turn. `--graphs` adds the same ways as CUDA graphs,
whose time is that of the device alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking whether there is a GPU must not open it before the fork

import torch
from gate import Gate
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.rough import by_bytes
from outcore.graph.record.keys import key_of
from outcore.memory.saved_tensors.lossy_error import effect_on_gradients
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.settings import Settings
from outcore.ops.recompute_encode import codec_for, held_bytes
from outcore.planner.memory.evaluate import StepModel
from outcore.program.policies import RECOMPUTE, Encode, Policy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = "alexnet:64x224,vgg19:64x224,inception_v3:64x299,resnet50:64x224,densenet121:64x224,unet:16x224"
KINDS = ("lossless", "again", "sparse", "half", "int8", "int4")
LIGHT = {"BatchNorm2d", "ReLU", "relu", "cat", "add", "iadd"}
"""What "again" recomputes: operations of one pass over memory."""
DEEPEST = 2
"""How many of these may follow each other."""
WARM_UPS, STEPS = 2, 2
BYTES_PER_S = 4e12
"""Of the device's memory: nothing is chosen by it here."""


@dataclass(frozen=True)
class Case:
    """A network and its batch: ``vgg19:64x224``, or ``vgg19:64x224:last`` for channels last."""

    name: str
    batch: int
    side: int
    last: bool

    @classmethod
    def of(cls, text: str) -> Case:
        name, size, *more = text.split(":")
        batch, side = size.split("x")
        return cls(name, int(batch), int(side), more == ["last"])

    def build(self) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        if self.name == "unet":
            model: nn.Module = outcore.models.UNet()
        else:
            import torchvision

            more = {"init_weights": False, "aux_logits": False} if self.name == "inception_v3" else {}
            model = getattr(torchvision.models, self.name)(**more)
        images = torch.randn(self.batch, 3, self.side, self.side)
        form = torch.channels_last if self.last else torch.contiguous_format
        return model.to(DEVICE, memory_format=form), images.to(DEVICE, memory_format=form)

    @property
    def facts(self) -> dict[str, Any]:
        return {"model": self.name, "batch": self.batch, "side": self.side, "last": self.last}


def policy_for(keeping: StepModel, kind: str) -> dict[str, Policy]:
    """Encodings for everything that can have one."""
    found: dict[str, Policy] = {}
    for buffer in keeping.buffers.values():
        if buffer.kind == "given" or buffer.opaque or not buffer.savers or buffer.bytes < 2**16:
            continue
        exact = [c for c in keeping.choices(buffer) if isinstance(c, Encode)]
        if exact:
            if kind != "signs" or exact == [Encode("sign")]:
                found[buffer.name] = exact[0]
        elif kind not in ("signs", "lossless", "again") and buffer.kind == "value" and buffer.element_bytes == 4:
            rectified = "sign" in buffer.savers.values()
            if kind != "sparse" or rectified:
                found[buffer.name] = Encode(kind)
    return found | made_again(keeping, found) if kind == "again" else found


def made_again(keeping: StepModel, coded: dict[str, Policy]) -> dict[str, Policy]:
    """Recomputing what light operations made, from what is there in full."""
    graph, depth = keeping.graph, dict[str, int]()
    blocks = [graph.blocks[call.block] for call in graph.calls.values()]
    for name, buffer in keeping.buffers.items():
        if name in coded or buffer.bytes < 2**16 or RECOMPUTE not in keeping.choices(buffer):
            continue
        deep = 1 + max((depth.get(source, 0) for source in buffer.sources), default=0)
        torn = any(coded.get(source) == Encode("sign") for source in buffer.sources)
        if blocks[buffer.born].type in LIGHT and deep <= DEEPEST and not torn:
            depth[name] = deep
    return dict.fromkeys(depth, RECOMPUTE)


def stashed(keeping: StepModel, policy: dict[str, Policy]) -> int:
    """Bytes that are held between forward and backward."""
    kept = [b for b in keeping.buffers.values() if b.savers and b.kind != "given"]
    held = {b.name: 0 if policy.get(b.name) == RECOMPUTE else b.bytes for b in kept}
    held |= {b.name: held_bytes(b, how)[0] for b in kept if isinstance(how := policy.get(b.name), Encode)}
    return sum(held.values())


class Subject:
    """A network, and the ways to train it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model, self.images = case.build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.graph = outcore.capture(self.model, (self.images,))
        self.costs = by_bytes(account(self.graph), BYTES_PER_S)
        self.keeping = StepModel(self.graph, self.costs, 0.0, None, BYTES_PER_S)
        self.governors: dict[str, Any] = {"plain": None}

    def prepare(self, kind: str, *, graphs: bool = False, effects: bool = False) -> dict[str, Any]:
        """Bring the model under a kind of encoding; returns what is known of it before it runs.

        What `outcore.within` does with a plan by hand, but with one recording for all kinds.
        """
        plan = policy_for(self.keeping, kind) if kind != "plain" else {}
        self.model.__dict__.pop("forward", None)
        settings = Settings(None, OptimizerCost.of(0.0, DEVICE), policy=plan, graphs=graphs)
        governor = ManagedForward(self.model, settings, self.costs)
        governor.admit(key_of(self.model, (self.images,), {}), (self.images,), {}, graph=self.graph)
        facts: dict[str, Any] = {"kept_bytes": stashed(self.keeping, {}), "stashed_bytes": stashed(self.keeping, plan)}
        facts["codecs"] = {
            how: list(map(str, plan.values())).count(how) for how in sorted(set(map(str, plan.values())))
        }
        effect = effect_on_gradients(governor, self.graph, (self.images,), {}) if effects else None
        if effect is not None and effect.whole and effect.worst:
            facts |= {"off": effect.whole.relative, "cosine": effect.whole.cosine, "median_off": effect.median}
            facts |= {"worst_off": effect.worst.relative, "worst": effect.worst.name}
        self.governors[kind] = governor
        return facts

    def enter(self, kind: str) -> None:
        """From here on the model runs in one of the ways that were prepared."""
        self.model.__dict__.pop("forward", None)
        if (governor := self.governors[kind]) is not None:
            self.model.__dict__["forward"] = governor

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self.images).square().mean().backward()
        self.optimizer.step()

    def warm_up(self) -> None:
        for _ in range(WARM_UPS):
            self.step()
        synchronise()

    def peak(self) -> dict[str, int]:
        """Of one step: with weights, gradients and images, and these alone."""
        weights = sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))
        gradients = sum(p.nbytes for p in self.model.parameters())
        held = weights + gradients + self.images.nbytes
        self.optimizer.zero_grad(set_to_none=True)
        if DEVICE != "cuda":
            return {"peak": 1, "held": held}
        gc.collect()
        synchronise()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        synchronise()
        return {"peak": torch.cuda.max_memory_allocated() - before + held - gradients, "held": held}

    def turns(self, kinds: list[str], rounds: int) -> dict[str, list[float]]:
        """Milliseconds of a step, each way in every round."""
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind in kinds:
                self.enter(kind)
                self.step()
                found[kind].append(min(self.timed()))
        return found

    def timed(self) -> Iterator[float]:
        if DEVICE != "cuda":
            yield from (1.0,)
            return
        events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        synchronise()
        for i in range(STEPS):
            yield events[i].elapsed_time(events[i + 1])


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def work(text: str, index: int, gate: Gate, rows: Any, args: argparse.Namespace) -> None:
    """One network, in a process of its own."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    case = Case.of(text)
    with gate.inside(index):
        try:
            subject = Subject(case)
            measure(subject, [k for k in args.kinds.split(",") if k], gate, rows, args)
            if args.graphs:
                as_graphs(subject, args.graphs.split(","), gate, rows, args)
        except Exception as error:
            rows.put({**case.facts, "how": "all", "error": f"{type(error).__name__}: {str(error)[:300]}"})
    rows.put(None)


def measure(subject: Subject, kinds: list[str], gate: Gate, rows: Any, args: argparse.Namespace) -> None:
    """All ways in turns, call by call."""
    facts: dict[str, dict[str, Any]] = {}
    for kind in ["plain", *kinds]:
        try:
            facts[kind] = subject.prepare(kind, effects=args.effects) if kind != "plain" else {}
            subject.enter(kind)
            subject.warm_up()
            facts[kind] |= subject.peak()
            if not args.rounds:
                rows.put({**subject.case.facts, "how": kind, **facts[kind]})
        except Exception as error:
            facts.pop(kind, None)
            rows.put({**subject.case.facts, "how": kind, "error": f"{type(error).__name__}: {str(error)[:300]}"})
    ways = list(facts)
    if not args.rounds:
        return
    with gate.alone():
        times = subject.turns(ways, args.rounds)
    for kind in ways:
        rows.put({**subject.case.facts, "how": kind, **facts[kind], **summary(times, kind)})


def as_graphs(subject: Subject, kinds: list[str], gate: Gate, rows: Any, args: argparse.Namespace) -> None:
    """One way after the other beside plain, both as CUDA graphs."""
    tidy(subject)
    base = recorded(subject, "plain")
    for kind in kinds:
        if time.time() > args.deadline:
            return
        try:
            reserved = recorded(subject, kind)
            with gate.alone():
                times = subject.turns(["plain", kind], args.rounds)
            facts = {"plain_reserved": base, "reserved": reserved, **summary(times, kind)}
        except Exception as error:
            facts = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        rows.put({**subject.case.facts, "how": kind, "graphs": True, **facts})
        tidy(subject, but="plain")
    tidy(subject)


def recorded(subject: Subject, kind: str) -> int:
    """Bring the model under a kind as CUDA graphs; returns the memory of these."""
    subject.prepare(kind, graphs=True)
    subject.enter(kind)
    subject.warm_up()
    graphed = next(iter(subject.governors[kind].admitted.values())).graphed
    return graphed.bytes if graphed is not None else 0


def tidy(subject: Subject, but: str = "") -> None:
    """Let go of what was prepared, and of the allocator's memory."""
    subject.model.__dict__.pop("forward", None)
    subject.governors = {k: g for k, g in subject.governors.items() if k == but} or {"plain": None}
    subject.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def summary(times: dict[str, list[float]], kind: str) -> dict[str, Any]:
    """The middle of the rounds: of the time, and of the ratio to plain in the same round."""
    if not times:
        return {}
    over = [a / b for a, b in zip(times[kind], times["plain"], strict=True)]
    found = {"ms": statistics.median(times[kind]), "over": statistics.median(over)}
    return found | {"plain_ms": statistics.median(times["plain"]), "rounds": [round(o, 4) for o in over]}


def sizes(case: Case, kinds: list[str]) -> dict[str, Any]:
    """What is stashed under each kind of encoding: sizes alone, which need no device."""
    model, _ = case.build()
    graph = outcore.capture(model, [(case.batch, 3, case.side, case.side)])
    keeping = StepModel(graph, by_bytes(account(graph), 1e12), 0.0, None)
    plain = sum(  # also what plain training keeps although backward needs no more than its shape
        b.bytes for b in keeping.buffers.values() if (b.savers or b.shapes) and b.kind != "given"
    )
    row = {**case.facts, "how": "sizes", "plain": plain}
    row |= {kind: stashed(keeping, policy_for(keeping, kind)) for kind in kinds}
    return row | {"needed_by": needed_by(keeping)}


def needed_by(keeping: StepModel) -> dict[str, int]:
    """What is stashed, by what of it backward needs: bytes."""
    found = dict.fromkeys(("a sign", "an index or mask", "norm", "convolution", "other"), 0)
    blocks = [keeping.graph.blocks[call.block].type for call in keeping.graph.calls.values()]
    for buffer in (b for b in keeping.buffers.values() if b.savers and b.kind != "given"):
        users = " ".join(blocks[i] for i, need in buffer.savers.items() if need == "full")
        if codec := codec_for(buffer):
            what = "a sign" if codec == "sign" else "an index or mask"
        else:
            what = "convolution" if "Conv" in users or "Linear" in users else "norm" if "Norm" in users else "other"
        found[what] += buffer.bytes
    return found


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All cases, as rows come."""
    cases = args.cases.split(",")
    with contextlib.suppress(ImportError):
        import torchvision  # noqa: F401 - once, before the processes part
    context = multiprocessing.get_context("fork")
    gate, rows = Gate(context, len(cases), 1e9), context.Queue()
    workers = [
        context.Process(target=work, args=(text, i, gate, rows, args), daemon=True) for i, text in enumerate(cases)
    ]
    for worker in workers:
        worker.start()
    left = len(workers)
    while left and time.time() < args.deadline:
        try:
            row = rows.get(timeout=1.0)
        except Exception:
            if not any(worker.is_alive() for worker in workers):
                break
            continue
        if row is None:
            left -= 1
        else:
            yield row
    for worker in workers:
        worker.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--graphs", default="", help="kinds that are also measured as CUDA graphs, plain beside each")
    parser.add_argument("--rounds", type=int, default=5, help="0 for bytes and gradients alone")
    parser.add_argument("--effects", action="store_true", help="compare gradients with exact ones")
    parser.add_argument("--sizes-only", action="store_true", help="train nothing")
    parser.add_argument("--seconds", type=float, default=1e6)
    args = parser.parse_args()
    started = time.time()
    args.deadline = started + args.seconds
    args.out.parent.mkdir(parents=True, exist_ok=True)
    environment: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    environment |= {"outcore": outcore.__version__, "precision": "float32, matrix products in TF32", "device": DEVICE}
    rows: list[dict[str, Any]] = []
    found = (
        (sizes(Case.of(text), args.kinds.split(",")) for text in args.cases.split(","))
        if args.sizes_only
        else run(args)
    )
    for row in found:
        rows.append(row)
        print(f"{time.time() - started:5.1f} s", json.dumps(row), flush=True)
        args.out.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    print(f"done after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
