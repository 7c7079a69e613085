"""Write the tables of README.md from the results: of every row the newest, with its ratio to plain in its own run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end -->"
KINDS = ("plain", "lossless", "again", "sparse", "half", "int8", "int4")
LOSSY = ("half", "int8", "int4")
Key = tuple[str, int, int, bool]


def found() -> dict[tuple[Key, str, bool], dict[str, Any]]:
    """Network and way -> the newest row of it that was timed, else the newest; call by call, or as CUDA graphs.

    Gradients may have been compared in another run. Files sort by the order in which they were made.
    """
    rows: dict[tuple[Key, str, bool], dict[str, Any]] = {}
    effects: dict[tuple[Key, str], dict[str, Any]] = {}
    for path in sorted((HERE / "results").glob("2026-11-16-h200*.json")):
        for row in json.loads(path.read_text()).get("rows", ()):
            if "last" not in row or "error" in row:
                continue
            key = (row["model"], row["batch"], row["side"], row["last"])
            if "off" in row:
                effects[key, row["how"]] = {name: row[name] for name in ("off", "cosine", "median_off", "worst_off")}
            name = (key, row["how"], row.get("graphs", False))
            if "over" in row or name not in rows:
                rows[name] = row
    return {(key, how, graphs): row | effects.get((key, how), {}) for (key, how, graphs), row in rows.items()}


def alone() -> dict[tuple[Key, str], float]:
    """Network and way -> what the device needs by its kernels, over what plain training needs."""
    found: dict[tuple[Key, str], float] = {}
    for path in sorted((HERE / "results").glob("*-device*.json")):
        rows = [row for row in json.loads(path.read_text())["rows"] if row.get("alike")]
        keyed = {((r["model"], r["batch"], r["side"], r["last"]), r["how"]): r for r in rows}
        plain = {key: row["device_ms"] for (key, how), row in keyed.items() if how == "plain"}
        ways = {name: row["device_ms"] for name, row in keyed.items() if name[1] != "plain" and name[0] in plain}
        found |= {(key, how): ms / plain[key] for (key, how), ms in ways.items()}
    return found


def name_of(key: Key) -> str:
    model, batch, side, last = key
    return f"{model} {batch}x{side}{', channels last' if last else ''}"


def measured() -> list[str]:
    rows, device = found(), alone()
    plain = {key: row for (key, how, graphs), row in rows.items() if how == "plain" and not graphs}
    out = [
        "| network | how | step ms | over plain | as CUDA graphs | kernels alone | peak GiB | less memory | "
        "above weights | stashed | gradient off by | cosine | median parameter | worst |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, base in plain.items():
        for how in KINDS:
            if (row := rows.get((key, how, False))) is None:
                continue
            ratios = (row.get("over"), rows.get((key, how, True), {}).get("over"), device.get((key, how)))
            times = [f"{row['ms']:.1f}" if "ms" in row else "not timed"]
            times += ["" if ratio is None else f"{ratio:.3f}x" for ratio in ratios]
            above, of_plain = row["peak"] - row["held"], base["peak"] - base["held"]
            stashed = f"{row['kept_bytes'] / row['stashed_bytes']:.2f}x" if "kept_bytes" in row else "1.00x"
            if "off" in row:
                off = f"{row['off']:.2%} | {row['cosine']:.6f} | {row['median_off']:.2%} | {row['worst_off']:.2%} |"
            else:
                off = "not compared | | | |" if how in LOSSY else "0 | 1 | 0 | 0 |"
            out.append(
                f"| {name_of(key)} | {how} | {' | '.join(times)} | {row['peak'] / 2**30:.2f} | "
                f"{base['peak'] / row['peak']:.2f}x | {of_plain / above:.2f}x | {stashed} | {off}"
            )
    return out


def sizes() -> list[str]:
    """What plain training stashes between forward and backward, and for what; and how much less the others do."""
    newest = json.loads(sorted((HERE / "results").glob("*-sizes*.json"))[-1].read_text())["rows"]
    uses = list(newest[0]["needed_by"])
    out = ["", f"| network | stashed by plain, GiB | of it for {' | '.join(uses)} | {' | '.join(KINDS[1:])} |"]
    out.append("|---" * (len(KINDS) + len(uses) + 1) + "|")
    for row in newest:
        whole = sum(row["needed_by"].values())
        shares = " | ".join(f"{row['needed_by'][use] / whole:.0%}" for use in uses)
        less = " | ".join(f"{row['plain'] / row[kind]:.2f}x" for kind in KINDS[1:])
        out.append(f"| {row['model']} {row['batch']}x{row['side']} | {row['plain'] / 2**30:.2f} | {shares} | {less} |")
    return out


def kernels() -> list[str]:
    """What each kernel costs."""
    out = ["", "| kernel, 64x64x224x224 float32 | ms | TB/s |", "|---|---|---|"]
    for path in sorted((HERE / "results").glob("*-kernels*.json"))[-1:]:
        for row in json.loads(path.read_text())["kernels"]:
            out.append(f"| {row['kernel']} | {row['ms']:.3f} | {row['bytes'] / row['ms'] / 1e9:.2f} |")
    return out


def exact() -> list[str]:
    """How many of the loss and the gradients are plain training's bit for bit, in the newest run of each network."""
    ways = ("plain repeats", "lossless", "again", "sparse", "of")
    out = ["", f"| network | precision | {' | '.join(ways)} |", "|---|---|---|---|---|---|---|"]
    found: dict[tuple[str, bool], dict[str, Any]] = {}
    for path in sorted((HERE / "results").glob("*-exact*.json")):
        found |= {(row["case"], row["bf16"]): row for row in json.loads(path.read_text())["equal"]}
    for (case, bf16), row in sorted(found.items()):
        precision = "bfloat16, channels last" if bf16 else "float32 (TF32)"
        equal = " | ".join(str(row.get(name, "not run")) for name in ways)
        out.append(f"| {case.replace(':', ' ')} | {precision} | {equal} |")
    return out


def training() -> list[str]:
    """How networks learn under each way."""
    out = []
    for path in sorted((HERE / "results").glob("*-training*.json"))[-1:]:
        document = json.loads(path.read_text())
        name = f"ResNet-18, {document['steps']} steps of {document['batch']}"
        out += ["", f"| {name} | loss, last tenth | accuracy | weights are plain training's |", "|---|---|---|---|"]
        for row in document["training"]:
            same = "yes" if row["weights_equal"] else "no"
            out.append(f"| {row['way']} | {row['last_tenth']:.4f} | {row['accuracy']:.1%} | {same} |")
    return out


def main() -> None:
    readme = HERE / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(
        f"{head}{BEGIN}\n\n"
        + "\n".join([*measured(), *sizes(), *exact(), *training(), *kernels()])
        + f"\n\n{END}{rest.partition(END)[2]}"
    )


if __name__ == "__main__":
    main()
