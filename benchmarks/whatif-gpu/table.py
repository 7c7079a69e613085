"""Predictions beside the trials: python benchmarks/whatif-gpu/table.py [DATE] [--save]; needs no GPU.

Techniques: the job as it is was trained, its predicted step is anchored to that (`outcore.whatif.anchor`), and every
technique is predicted from there. Shares: the same anchored step, carried over to a GPU of fewer multiprocessors whose
memory rate is what the share copies.

Where the trials did not time the host by itself, its factor comes from the *other* networks of the same run: the median
of those whose step depends on it. No row is predicted with a factor that was found from a row of its own network.
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
from outcore.whatif.answer import interval_s
from outcore.whatif.elsewhere import carried_to
from outcore.whatif.recorded_step import RecordedStep
from outcore.whatif.recording import SetupRecording, record_setup
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.techniques import parse_techniques

RESULTS = Path(__file__).parent / "results"
H200 = parse("h200").devices[0]
DEPENDS = 0.4
"""A step says something of the host if it takes so much of a change of the host's factor."""
CLEAR = 0.03
"""A measured gain is clear beyond this."""


def rows(name: str) -> list[dict[str, Any]]:
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def recorded(network: str, question: str) -> SetupRecording:
    setup = TrainingSetup(networks.SHARES[network])
    for technique in parse_techniques(question) if question else ():
        setup = technique.setup(setup)
    return record_setup(setup, H200)


def own_host(step: RecordedStep, trial: dict[str, Any]) -> float | None:
    """The host's factor as one step has it; None where the step hardly depends on it."""
    anchor = Anchor.of(step, trial["step_s"], trial["busy_s"])

    def at(factor: float) -> float:
        return replace(anchor, host=factor * anchor.host).apply(step).simulate().step_s

    return anchor.host if (at(1.1) - at(0.9)) / 0.2 > DEPENDS * at(1.0) else None


def hosts(steps: dict[str, list[tuple[RecordedStep, dict[str, Any]]]]) -> dict[str, float | None]:
    """By network: the median factor of the host in the steps of the others."""
    own = {n: [f for step, trial in found if (f := own_host(step, trial)) is not None] for n, found in steps.items()}
    others = {n: [f for other, factors in own.items() if other != n for f in factors] for n in own}
    return {n: statistics.median(found) if found else None for n, found in others.items()}


def anchored(step: RecordedStep, trial: dict[str, Any], host: float | None) -> Anchor:
    return Anchor.of(step, trial["step_s"], trial["busy_s"], trial.get("issue_s"), host=host)


def techniques(name: str) -> Iterator[dict[str, Any]]:
    """Of trials on the whole GPU; of a run of shares, `amp` where the host was timed."""
    trials = [r for r in rows(name) if "network" in r and "step_s" in r and r["share"] == 100]
    if "shares" in name:
        trials = [r for r in trials if r.get("issue_s") is not None]
    names = list(dict.fromkeys(r["network"] for r in trials))
    bases = {n: recorded(n, "") for n in names}
    alone = {r["network"]: r for r in trials if not r["question"]}
    host = hosts({n: [(bases[n].step, alone[n])] for n in names if n in alone})
    for trial in trials:
        network, question = trial["network"], trial["question"]
        real = trial.get("plain") or alone.get(network)
        if not question or real is None:
            continue
        base, found, used = bases[network], recorded(network, question), parse_techniques(question)
        anchor = anchored(base.step, real, host.get(network))
        plain = anchor.apply(base.step).simulate()
        step = found.step
        for technique in used:
            step = technique.tasks(step, found)
        after = anchor.apply(step).simulate()
        ratio = found.setup.batch / base.setup.batch
        low_s, high_s = interval_s(after, plain, used, anchored=True)
        per_s = ratio * plain.step_s
        yield {
            "network": network,
            "question": question,
            "measured_s": trial["step_s"],
            "predicted_s": after.step_s,
            "interval_s": [low_s, high_s],
            "error": after.step_s / trial["step_s"] - 1,
            "measured_gain": ratio * real["step_s"] / trial["step_s"],
            "predicted_gain": per_s / after.step_s,
            "predicted_gain_interval": [per_s / high_s, per_s / low_s],
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
    bases = {(n, q): recorded(n, q) for share, n, q in trials if share == 100}
    steps: dict[str, list[tuple[RecordedStep, dict[str, Any]]]] = {}
    for (network, question), base in bases.items():
        steps.setdefault(network, []).append((base.step, trials[100, network, question]))
    host = hosts(steps)
    for (share, network, question), trial in trials.items():
        whole = trials.get((100, network, question))
        if share == 100 or whole is None:
            continue
        base = bases[network, question]
        anchor = anchored(base.step, whole, host[network])
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
        said = f" {judged(row)} |" if gains else ""
        name = f"{row['network']} | {row.get('share', '')} | {row['question']}".replace("|  |", "|")
        times = f"{row['predicted_s'] * 1e3:.1f} ms | {row['measured_s'] * 1e3:.1f} ms"
        print(f"| {name} | {times} | {gains}{row['error']:+.1%} | {row['busy_error']:+.1%} |{said}")
    summary(found)


def summary(found: list[dict[str, Any]]) -> None:
    if not found:
        return
    for key in ("error", "busy_error"):
        errors = sorted(abs(row[key]) for row in found)
        beyond = sum(error > 0.2 for error in errors)
        print(f"{key}: {len(errors)} cases, median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, ", end="")
        print(f"{beyond} beyond 20 %")
    by: dict[str, list[float]] = {}
    for row in found:
        by.setdefault(str(row.get("share", row["question"].partition("=")[0])), []).append(abs(row["error"]))
    print({k: f"{statistics.median(v):.1%}" for k, v in by.items()})
    if "predicted_gain" in found[0]:
        signs(found)


def signs(found: list[dict[str, Any]]) -> None:
    """By the sign alone, and by what the interval of the gain says."""
    wrong = [r for r in found if (r["predicted_gain"] - 1) * (r["measured_gain"] - 1) < 0]
    print(f"sign of the gain, whatever its size: right in {len(found) - len(wrong)} of {len(found)}")
    said: dict[str, list[dict[str, Any]]] = {"right": [], "not said": [], "wrong": []}
    for row in found:
        said[judged(row)].append(row)
    print("verdict: " + ", ".join(f"{len(of)} {name}" for name, of in said.items()))
    for name in ("not said", "wrong"):
        for r in said[name]:
            low, high = r["predicted_gain_interval"]
            print(
                f"  {name}: {r['network']} {r['question']}: {low:.2f} to {high:.2f}, measured {r['measured_gain']:.2f}"
            )
    inside = sum(r["interval_s"][0] <= r["measured_s"] <= r["interval_s"][1] for r in found)
    print(f"measured step inside of the interval (four in five are wanted): {inside} of {len(found)}")


def judged(row: dict[str, Any]) -> str:
    """Right: the side on which the interval lies is that of the measured gain, or neither is clear."""
    low, high = row["predicted_gain_interval"]
    side = 1 if low > 1 else -1 if high < 1 else 0
    gain = row["measured_gain"] - 1
    real = 0 if abs(gain) <= CLEAR else 1 if gain > 0 else -1
    if side == 0:
        return "right" if real == 0 else "not said"
    return "right" if side == real or (real == 0 and min(abs(low - 1), abs(high - 1)) <= CLEAR) else "wrong"


def main() -> None:
    dates = [word for word in sys.argv[1:] if not word.startswith("-")] or ["2026-11-17", "2026-11-17-evening"]
    latest: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {"techniques": {}, "amp": {}, "shares": {}}
    for date in dates:
        made = {
            "techniques": list(techniques(f"{date}-techniques.jsonl")),
            "amp": list(techniques(f"{date}-shares.jsonl")),
            "shares": list(shares(f"{date}-shares.jsonl")),
        }
        for name, found in made.items():
            if found:
                print(f"\n{date}: {name}")
                show(found)
            latest[name] |= {(r["network"], r["question"], r.get("share")): r for r in found}
        if "--save" in sys.argv:
            (RESULTS / f"{date}-predicted.json").write_text(json.dumps(made, indent=1) + "\n")
    for name, rows_of in latest.items():
        print(f"\n{name}, of each case the last")
        summary(list(rows_of.values()))


if __name__ == "__main__":
    main()
