"""The memory law: budgets from all of plain training's peak down to the smallest, and what training then really took.

    python benchmarks/within-law/run.py --out rows.jsonl --processes 3 --seconds 85 --cases resnet50:1x2048:tf32 …
    python benchmarks/within-law/run.py --collect rows.jsonl …                   (makes results/… and the table)

Each case calls `outcore.within` as it comes, with the loss and the optimizer that train, and trains. On a GPU the
peak is the allocator's, of everything in the process; on a CPU the bytes of living tensors, counted. A budget below the
smallest is refused, and what the refusal names is the last budget. Memory needs no device of one's own, so cases run
side by side; times are predicted only.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that asking for CUDA does not start it before a fork
sys.path.insert(0, str(Path(__file__).parent))

import torch
from trained import TEXT, Case, Trained, loss_of, torchvision

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.errors import PlanError
from outcore.memory.saved_tensors.peak_monitor import homes_of

HERE = Path(__file__).parent
STARTED = time.time()
SHARES = (0.5, 0.0, 1.0, 0.3, 0.8, 0.4, 0.6)
"""Of plain training's peak, those that tell most first; zero is refused and becomes the smallest."""
WATCHED, LATER = 7, 3
"""Steps in which a plan may be corrected, and steps after them."""
Row = dict[str, Any]


def main() -> None:
    """Run, or collect what was run."""
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("law.jsonl"))
    options.add_argument("--cases", nargs="*", default=[], help="model:BATCHxSIDE:precision[:share,share…]")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--seconds", type=float, default=float("inf"), help="begin no budget after so long")
    options.add_argument("--measure", type=float, default=8.0, help="seconds for the costs of a model's calls")
    options.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options.add_argument("--collect", type=Path, nargs="*", help="rows to make a result of")
    chosen = options.parse_args()
    if chosen.collect:
        collect(read(chosen.collect))
        return
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(1)
    torchvision()
    if any(text.startswith(TEXT) for text in chosen.cases):
        import transformers

        # Which imports them, before forking.
        _ = (
            transformers.BertModel,
            transformers.DistilBertModel,
            transformers.GPT2LMHeadModel,
            transformers.T5EncoderModel,
        )
    gc.freeze()
    fork = multiprocessing.get_context("fork")
    following = fork.Value("i", 0)
    workers = [fork.Process(target=work, args=(chosen, following)) for _ in range(chosen.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def work(chosen: argparse.Namespace, following: Any) -> None:
    """Take the next case until there is none, or no time."""
    device = torch.device(chosen.device)
    while time.time() - STARTED < chosen.seconds:
        with following.get_lock():
            number = following.value
            following.value += 1
        if number >= len(chosen.cases):
            return
        text = chosen.cases[number]
        model, size, precision, *shares = text.split(":")
        asked = [float(share) for share in shares[0].split(",")] if shares else SHARES
        case = Case.parse(f"{model}:{size}:{precision}")
        try:
            for row in rows(case, device, asked, chosen):
                write(chosen.out, case, device, row)
        except Exception as error:
            write(
                chosen.out,
                case,
                device,
                {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]},
            )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def write(out: Path, case: Case, device: torch.device, row: Row) -> None:
    """Add a row."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    where = {"on": name, "torch": torch.__version__, "date": str(date.today()), "at": round(time.time() - STARTED, 1)}
    with out.open("a") as file:
        file.write(json.dumps({"case": str(case), **row, **where}) + "\n")


def rows(case: Case, device: torch.device, shares: Iterable[float], chosen: argparse.Namespace) -> Iterator[Row]:
    """Plain training, then budgets."""
    trained = Trained(case, device)
    with trained.autocast():
        costs = outcore.measure(outcore.capture(trained.model, (trained.batch,)), time_limit_s=chosen.measure)
        within(trained, None, costs)
    plain = outcore.memory_plan(trained.model).plain_bytes
    outcore.release(trained.model)
    yield {"share": "plain", "predicted": plain, **peaks(trained, watched=2)}
    smallest = 0
    for share in shares:
        if time.time() - STARTED > chosen.seconds:
            return
        budget, named = int(share * plain), 0
        if share and budget < smallest:
            continue
        try:
            within(trained, budget, costs)
        except PlanError as refused:
            named = refused.least_bytes or 0
            budget = smallest = -(-named // 2**20) * 2**20  # as the refusal says it
            try:
                within(trained, budget, costs)
            except PlanError as again:
                yield {"share": share, "named": named, "refused_again": str(again)}
                continue
        first = outcore.memory_plan(trained.model)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            seen = peaks(trained, watched=WATCHED)
        plan = outcore.memory_plan(trained.model)
        said = [str(w.message) for w in warned if "outcore" in str(w.message)]
        yield {
            "share": "smallest" if named else share,
            "budget": budget,
            "predicted": plan.peak_bytes,
            "reserved": plan.reserved_bytes,
            "predicted_phases": predicted_phases(plan),
            "slowdown": plan.slowdown,
            "state": "" if plan.state.idle else str(plan.state),
            "replanned": plan is not first,
            **({"said": said} if said else {}),
            **seen,
        }
        outcore.release(trained.model)


def within(trained: Trained, budget: int | None, costs: outcore.Costs) -> None:
    """As somebody would call it; costs are measured once for all budgets."""
    gc.collect()
    if trained.device.type == "cuda":
        torch.cuda.empty_cache()
    with trained.autocast():
        outcore.within(
            trained.model,
            (trained.batch,),
            memory=budget,
            loss=loss_of,
            optimizer=trained.optimizer,
            costs=costs,
            stream=False,
            quiet=True,
        )


def peaks(trained: Trained, watched: int) -> Row:
    """The most a step took, in the first steps and in later ones."""
    if trained.device.type != "cuda":
        return {"first": counted(trained), "measured": counted(trained)}
    found = []
    for count in (watched, LATER):  # nothing is reset in between: outcore watches the first steps by the same counter
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        most = 0
        for _ in range(count):
            trained.step()
            torch.cuda.synchronize()
            most = max(most, torch.cuda.max_memory_allocated())
        found.append(most)
    return {"first": found[0], "measured": found[1], "phases": phases(trained)}


def phases(trained: Trained) -> list[int]:
    """The peaks of forward, backward and the optimizer's step."""
    found = []
    trained.optimizer.zero_grad()
    for part in trained.parts():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        part()
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated())
    return found


def predicted_phases(plan: Any) -> list[int]:
    """What is predicted of the same."""
    curve, moments = plan.outcome.curve, plan.keeping.plain.moments
    most = {m.phase: 0 for m in moments}
    for moment, size in zip(moments, curve, strict=False):
        most[moment.phase] = max(most[moment.phase], int(size) + plan.reserved_bytes)
    return list(most.values())


def counted(trained: Trained) -> int:
    """Bytes of living tensors at most in a step, without what is mapped from the disk below the device."""
    trained.step()  # the optimizer's state is there from now on
    trained.optimizer.zero_grad()
    state = [t for s in trained.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    tensors = [*trained.model.parameters(), *trained.model.buffers(), trained.batch, *state]
    managed_forward = trained.model.__dict__.get("forward")
    homes = (
        homes_of(managed_forward.keeper) if managed_forward is not None and managed_forward.keeper is not None else []
    )
    there = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for home in homes:
        there.pop(home.untyped_storage().data_ptr(), None)
    with LiveBytes([*tensors, *homes]) as live:
        trained.step()
    return live.peak + sum(there.values())


def read(paths: Iterable[Path]) -> list[Row]:
    """Rows of several files, the last of each budget."""
    lines = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    return list({key(row): row for row in lines}.values())


def key(row: Row) -> tuple[str, str, str]:
    """What a row is about."""
    return row["case"], str(row.get("share")), row["on"]


def collect(found: list[Row]) -> None:
    """Write rows as a result of their day and device, and print the table."""
    for device in sorted({row["on"] for row in found}):
        of = [r for r in found if r["on"] == device]
        name = f"{max(r['date'] for r in of)}-{'h200' if 'H200' in device else device.split()[-1].lower()}.json"
        (HERE / "results" / name).write_text("[\n" + ",\n".join(json.dumps(r) for r in of) + "\n]\n")
    latest = [row for path in sorted((HERE / "results").glob("*.json")) for row in json.loads(path.read_text())]
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition("<!-- made by --collect -->\n")
    after = rest.partition("<!-- end -->\n")[2]
    made = table(list({key(row): row for row in latest}.values()))
    readme.write_text(f"{before}<!-- made by --collect -->\n{made}\n<!-- end -->\n{after}")
    print(made)


def table(found: list[Row]) -> str:
    """A line per budget."""
    heads = ["on", "model, size, precision", "share", "budget MiB", "predicted MiB", "measured MiB"]
    heads += ["of budget", "of predicted", "step, predicted", ""]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for r in sorted(found, key=order):
        if "measured" not in r:
            cells = ["H200" if "H200" in r["on"] else r["on"], r["case"].replace(":", " "), str(r.get("share", ""))]
            lines.append(f"| {' | '.join(cells)} | | | | | | | {r.get('error') or r.get('refused_again')} |")
            continue
        budget = r.get("budget")
        cells = ["H200" if "H200" in r["on"] else r["on"], r["case"].replace(":", " "), r["share"]]
        cells += [mib(budget), mib(r["predicted"]), mib(r["measured"])]
        cells += [f"{r['measured'] / budget:.3f}" if budget else "", f"{r['measured'] / r['predicted']:.3f}"]
        notes = [r.get("state", ""), "planned again" if r.get("replanned") else "", r.get("note", "")]
        cells += [f"{r['slowdown']:.2f}x" if budget else "1x", ", ".join(n for n in notes if n)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def order(row: Row) -> tuple[Any, ...]:
    """Models as they come, plain training first, then the largest budget."""
    share = {"plain": 9.0, "smallest": 0.0}.get(row.get("share"), row.get("share", -1.0))
    return row["on"], row["case"], -float(share)


def mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:,.0f}"


if __name__ == "__main__":
    main()
