"""Fit the samples of `collect.py`, predict what was held out, and write results, calibration and picture.

python benchmarks/conv-time/report.py --samples DIR --results benchmarks/conv-time/results --calibrations
DIR
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from picture import scatter
from polynomial import predict_raw

from outcore.cost import Calibration, Ceiling, Sample, fit_calibration, read_samples
from outcore.cost.predicted.calibration import file_name, training_samples
from outcore.cost.predicted.efficiency import fit_efficiency
from outcore.machine import Machine


def samples_of(directory: Path, name: str) -> list[Sample]:
    for path in (directory / f"{name}.jsonl", directory / f"{name}.jsonl.gz"):
        if path.exists():
            return read_samples(path)
    return []


def training(directory: Path, dtype: str) -> list[Sample]:
    """What a calibration is fitted to.

    Batch norms of the first sweep had weights of the small type, which nobody's have: others count, if there are some.
    """
    swept = [s for name in ("sweep", "family", "long", "parts") for s in samples_of(directory, f"{name}-{dtype}")]
    of_networks = samples_of(directory, f"networks-{dtype}")
    if of_networks and dtype == "bf16":
        swept = [s for s in swept if (s.operation.kind, s.operation.variant) != ("norm", "batch")]
    return swept + of_networks


def score(predicted: Any, measured: Any) -> dict[str, float]:
    error = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    return {
        "median": round(float(np.median(error)), 4),
        "p90": round(float(np.percentile(error, 90)), 4),
        "worst": round(float(error.max()), 4),
        "negative": int((np.asarray(predicted) <= 0).sum()),
        "count": len(error),
    }


def like_the_talks(samples: list[Sample]) -> list[Sample]:
    """Dense, two-dimensional, square, undilated: what the talks' five sizes can describe."""
    ops = ((s, s.operation) for s in samples)
    return [
        s
        for s, o in ops
        if o.kind == "conv" and o.groups == 1 and len(o.size) == 2 and set(o.stride) == {1} and set(o.dilation) == {1}
    ]


def compare(calibration: Calibration, base: Ceiling, family: list[Sample], test: list[Sample]) -> dict[str, Any]:
    """Errors of each way to predict on one set of held-out samples."""
    operations, measured = [s.operation for s in test], [s.timing.median_s for s in test]
    predictions = calibration.predict(operations)
    rows = {
        "calibration": score([p.time_s for p in predictions], measured),
        "roofline by probed rates": score([base.time_s(o) for o in operations], measured),
    }
    inside = [
        low <= t <= high for (low, high), t in zip([(p.low_s, p.high_s) for p in predictions], measured, strict=True)
    ]
    rows["calibration"]["within_interval"] = round(sum(inside) / len(inside), 3)
    rows["calibration"]["extrapolated"] = sum(p.trust != "measured range" for p in predictions)
    if family and like_the_talks(test) == test:
        for degree in (2, 3):
            rows[f"raw polynomial of degree {degree}"] = score(predict_raw(family, operations, degree=degree), measured)
    return rows


def whole_networks(calibration: Calibration, twelve: list[Sample]) -> list[dict[str, Any]]:
    """The twelve-convolution network as a whole, at each batch size and memory format."""
    networks: dict[tuple[int, bool], list[Sample]] = {}
    for sample in twelve:
        networks.setdefault((sample.operation.batch, sample.operation.channels_last), []).append(sample)
    rows = []
    for (batch, channels_last), samples in networks.items():
        predicted = sum(p.time_s for p in calibration.predict([s.operation for s in samples])) * 1e3
        measured = sum(s.timing.median_s for s in samples) * 1e3
        rows.append(
            {
                "batch": batch,
                "channels_last": channels_last,
                "measured_ms": round(measured, 4),
                "predicted_ms": round(predicted, 4),
                "error": round(predicted / measured - 1, 4),
            }
        )
    return rows


def print_talks(samples: list[Sample]) -> list[str]:
    """Times in the form in which the talks print them."""
    lines: list[str] = []
    for forward, backward in zip(samples[0::2], samples[1::2], strict=True):
        o = forward.operation
        lines += [f"nn.Conv2d({o.in_channels}, {o.out_channels}, {o.kernel[0]}, 1)", "Conv2d layer", "-----"]
        for title, timing in (("Forward", forward.timing), ("Backward", backward.timing)):
            lines.append(f"### {title} ###")
            for name in ("min", "median", "max", "mean"):
                lines.append(f"{name}: {getattr(timing, name + '_s') * 1e3:.6f} ms")
        lines.append("")
    return lines


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result, for the README."""
    lines = [
        "| precision | predicted | by | median error | p90 | worst | below zero | of |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dtype, part in result["precisions"].items():
        for name, rows in part["compared"].items():
            for method, row in rows.items():
                errors = " | ".join(f"{row[key]:.1%}" for key in ("median", "p90", "worst"))
                lines.append(f"| {dtype} | {name} | {method} | {errors} | {row['negative']} | {row['count']} |")
    lines += [
        "",
        "| the twelve-layer network | batch | channels last | measured | predicted | error |",
        "|---" * 6 + "|",
    ]
    for dtype, part in result["precisions"].items():
        for row in part["whole_network"]:
            times = f"{row['measured_ms']:.3f} ms | {row['predicted_ms']:.3f} ms | {row['error']:+.1%}"
            lines.append(f"| {dtype} | {row['batch']} | {'yes' if row['channels_last'] else 'no'} | {times} |")
    dtypes = list(result["precisions"])
    kinds = list(dict.fromkeys(kind for dtype in dtypes for kind in result["precisions"][dtype]["held_out_by_kind"]))
    lines += ["", "| kind | " + " | ".join(f"{dtype}: median / p90 (samples, method)" for dtype in dtypes) + " |"]
    lines.append("|---" * (1 + len(dtypes)) + "|")
    for kind in kinds:
        cells = []
        for dtype in dtypes:
            found = result["precisions"][dtype]["held_out_by_kind"].get(kind)
            cells.append(f"{found[2]:.1%} / {found[3]:.1%} ({found[0]}, {found[1]})" if found else "–")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def refitted(calibration: Calibration, samples: list[Sample], families: list[str]) -> Calibration:
    """A calibration with some families fitted again by the Gaussian process, where there are more samples or it errs
    less."""
    models = dict(calibration.models)
    for family in families:
        for part in ("forward", "weight" if family == "first" else "backward"):
            chosen = training_samples(samples, calibration.base, family, part)
            model, before = (
                fit_efficiency(chosen, calibration.base, methods=("gaussian",)),
                models.get(f"{family}/{part}"),
            )
            if before is None or model.samples > before.samples or model.errors["median"] < before.errors["median"]:
                models[f"{family}/{part}"] = model
    return replace(calibration, models=models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--calibrations", type=Path, required=True, help="directory for the calibration files")
    parser.add_argument("--refit", action="store_true", help="fit again although the calibration is there")
    parser.add_argument("--refit-only", nargs="*", default=[], help="families to fit again, e.g. dense norm")
    options = parser.parse_args()
    machine = Machine.load(options.samples / "machine.json")
    environment = json.loads((options.samples / "environment.json").read_text())
    device = machine.device()
    date = datetime.date.today().isoformat()
    result: dict[str, Any] = {"date": date, "environment": environment, "machine": machine.to_json(), "precisions": {}}
    slug = "-".join("".join(c if c.isalnum() else " " for c in device.name.lower()).split())
    for dtype in ("fp32", "tf32", "bf16"):
        train = training(options.samples, dtype)
        if not train:
            continue
        path = options.calibrations / file_name(device.name, dtype)
        if options.refit or not path.exists():
            about = {"date": date, **{k: environment[k] for k in ("torch", "cuda", "cudnn", "threads")}}
            fit_calibration(train, device, dtype, about=about).save(path)
        calibration = Calibration.load(path)
        if options.refit_only:
            calibration = refitted(calibration, train, options.refit_only)
            calibration.save(path)
        sets = {
            name: samples_of(options.samples, f"{name}-{dtype}") for name in ("talks", "family-held-out", "held-out")
        }
        errors = {name: list(values) for name, values in calibration.errors().items()}
        family = samples_of(options.samples, f"family-{dtype}")
        compared = {
            name: compare(calibration, Ceiling.of(device, dtype), family, test) for name, test in sets.items() if test
        }
        twelve = sets["talks"][4:]
        layers = [
            {"operation": str(s.operation), "measured_ms": s.timing.median_s * 1e3, "predicted_ms": p.time_s * 1e3}
            for s, p in zip(twelve, calibration.predict([s.operation for s in twelve]), strict=True)
        ]
        result["precisions"][dtype] = {
            "samples": len(train),
            "calibration_bytes": path.stat().st_size,
            "held_out_by_kind": errors,
            "compared": compared,
            "talks_printed": print_talks(sets["talks"][:4]),
            "twelve": layers,
            "whole_network": whole_networks(calibration, twelve),
        }
        points = [
            (name, s.timing.median_s * 1e3, p.time_s * 1e3)
            for name, test in sets.items()
            for s, p in zip(test, calibration.predict([s.operation for s in test]), strict=True)
        ]
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / f"{date}-{slug}-{dtype}.svg").write_text(scatter(points, title=f"{device.name}, {dtype}"))
        print(f"\n{dtype}: {len(train)} samples, calibration {path.stat().st_size / 1e3:.0f} kB")
        for name, rows in compared.items():
            for method, row in rows.items():
                print(f"  {name:16} {method:28} median {row['median']:.1%} p90 {row['p90']:.1%} ({row['count']:.0f})")
        print("\n".join(result["precisions"][dtype]["talks_printed"]))
    (options.results / f"{date}-{slug}.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.results / f"{date}-{slug}.md").write_text(markdown(result))


if __name__ == "__main__":
    main()
