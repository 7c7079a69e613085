"""Predictions beside the trials: python benchmarks/whatif-gpu/table.py; needs no GPU.

Techniques: the job as it is was trained, its predicted step is anchored to that (`outcore.whatif.anchor`), and every
technique is predicted from there. Shares: the same anchored step, carried over to a GPU of fewer multiprocessors whose
memory rate is what the share copies.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks

from outcore.machine import Device, parse
from outcore.whatif.anchor import Anchor
from outcore.whatif.elsewhere import carried_to
from outcore.whatif.recording import Recording, record_setup
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.techniques import parse_techniques

RESULTS = Path(__file__).parent / "results"
H200 = parse("h200").devices[0]


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def recorded(network: str, question: str) -> Recording:
    setup = TrainingSetup(networks.SHARES[network])
    for technique in parse_techniques(question) if question else ():
        setup = technique.setup(setup)
    return record_setup(setup, H200)


def techniques(name: str) -> Iterator[dict[str, Any]]:
    trials = [r for r in rows(name) if "network" in r and "step_s" in r]
    for network in dict.fromkeys(r["network"] for r in trials):
        own = {r["question"]: r for r in trials if r["network"] == network}
        base = recorded(network, "")
        anchor = Anchor.of(base.step, own[""]["step_s"], own[""]["busy_s"])
        plain = anchor.apply(base.step).simulate()
        for question, trial in own.items():
            if not question:
                continue
            found = recorded(network, question)
            step = found.step
            for technique in parse_techniques(question):
                step = technique.tasks(step, found)
            after = anchor.apply(step).simulate()
            ratio = found.setup.batch / base.setup.batch
            yield {
                "network": network,
                "question": question,
                "measured_s": trial["step_s"],
                "predicted_s": after.step_s,
                "error": after.step_s / trial["step_s"] - 1,
                "measured_gain": ratio * own[""]["step_s"] / trial["step_s"],
                "predicted_gain": ratio * plain.step_s / after.step_s,
                "busy_error": after.busy_s("device") / trial["busy_s"] - 1,
                "host_factor": anchor.host,
                "device_factor": anchor.device,
            }


def share_of(line: dict[str, Any], whole: dict[str, Any]) -> Device:
    """The H200 with a share of its multiprocessors; its memory at the rate at which the share copies."""
    part = line["sms"] / whole["sms"]
    rates = {precision: rate * part for precision, rate in H200.rates.items()}
    bandwidth = H200.bandwidth_bytes_per_s * line["copy_bytes_per_s"] / whole["copy_bytes_per_s"]
    return replace(H200, name=f"{line['share']} %", rates=rates, sms=line["sms"], bandwidth_bytes_per_s=bandwidth)


def shares(name: str) -> Iterator[dict[str, Any]]:
    found = rows(name)
    heads = {r["share"]: r for r in found if "sms" in r}
    trials = {(r["share"], r["network"], r["question"]): r for r in found if "step_s" in r}
    for (share, network, question), trial in trials.items():
        whole = trials.get((100, network, question))
        if share == 100 or whole is None:
            continue
        base = recorded(network, question)
        anchor = Anchor.of(base.step, whole["step_s"], whole["busy_s"])
        device = share_of(heads[share], heads[100])
        calls = {n: _anchored(c, anchor.device) for n, c in base.profile.costs.calls.items()}
        costs = replace(base.profile.costs, calls=calls)
        known = replace(base, profile=replace(base.profile, costs=costs))
        if base.optimizer is not None:
            known = replace(known, optimizer=base.optimizer.scaled(anchor.device))
        step = Anchor(1.0, anchor.host).apply(carried_to(known, device).step).simulate()
        yield {
            "share": share,
            "network": network,
            "question": question or "as it is",
            "measured_s": trial["step_s"],
            "predicted_s": step.step_s,
            "error": step.step_s / trial["step_s"] - 1,
            "busy_error": step.busy_s("device") / trial["busy_s"] - 1,
        }


def _anchored(cost: Any, factor: float) -> Any:
    return replace(
        cost,
        forward=cost.forward.scaled(factor) if cost.forward is not None else None,
        backward=cost.backward.scaled(factor) if cost.backward is not None else None,
    )


def show(found: list[dict[str, Any]]) -> None:
    for row in found:
        gains = f"{row['predicted_gain']:.2f}x | {row['measured_gain']:.2f}x | " if "predicted_gain" in row else ""
        name = f"{row['network']} | {row.get('share', '')} | {row['question']}".replace("|  |", "|")
        times = f"{row['predicted_s'] * 1e3:.1f} ms | {row['measured_s'] * 1e3:.1f} ms"
        print(f"| {name} | {times} | {gains}{row['error']:+.1%} | {row['busy_error']:+.1%} |")
    for key in ("error", "busy_error"):
        errors = sorted(abs(row[key]) for row in found)
        print(f"{key}: {len(errors)} cases, median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}")
    by: dict[str, list[float]] = {}
    for row in found:
        by.setdefault(str(row.get("share", row["question"].partition("=")[0])), []).append(abs(row["error"]))
    print({k: f"{statistics.median(v):.1%}" for k, v in by.items()})
    if found and "predicted_gain" in found[0]:
        wrong = [r for r in found if (r["predicted_gain"] - 1) * (r["measured_gain"] - 1) < 0]
        clear = [r for r in wrong if max(abs(r["predicted_gain"] - 1), abs(r["measured_gain"] - 1)) > 0.05]
        print(f"sign: {len(wrong)} wrong, {len(clear)} of them by more than 5 %:")
        print(
            [(r["network"], r["question"], round(r["predicted_gain"], 2), round(r["measured_gain"], 2)) for r in clear]
        )


if __name__ == "__main__":
    made = {
        "techniques": list(techniques("2026-11-17-techniques.jsonl")),
        "shares": list(shares("2026-11-17-shares.jsonl")),
    }
    for name, found in made.items():
        print(f"\n{name}")
        show(found)
    if "--save" in sys.argv:
        (RESULTS / "2026-11-17-predicted.json").write_text(json.dumps(made, indent=1) + "\n")
