"""Write the tables and pictures of README.md from the results, and say what is missing and which aims are missed."""

from __future__ import annotations

import json

from networks import NAMES
from picture import SHOWN, picture
from rows import HERE, PEERS, Found, Key, Point, results, unbeaten

COLUMNS = {"0.5": "0.50", "0.33": "0.33", "least": "least", "0.5 reassociated": "0.50*", "0.33 reassociated": "0.33*"}
AIMS = {"1x4096": {"0.5": 1.10, "0.33": 1.20, "least": 1.40}, "32x224": {"0.5": 1.15, "0.33": 1.30}}
NORMS = "2026-11-15-h200-norms-three-launches.json"


def way(column: str, size: str) -> str:
    """The name of a way of ours."""
    share, _, norms = column.partition(" ")
    return " ".join(filter(None, ("outcore", share, "graphs" if size == "32x224" else "", norms)))


def cell(case: Found, how: str) -> str:
    """Time and memory over plain's."""
    if (point := case.points.get(how)) is None:
        why = case.missed.get(how, "")
        return "no plan" if "no plan" in why else "host memory" if "of the host" in why else ""
    return f"{point.slower:.2f}x at {point.share:.2f}{'' if point.within else '!'}{'†' if point.old else ''}"


def table(cases: dict[Key, Found], size: str) -> list[str]:
    """One line per network and precision."""
    shown = [*COLUMNS.values(), "floor", "checkpoint per block", "save_on_cpu", "compile 0.5"]
    out = ["| network | precision | plain | " + " | ".join(shown) + " |", "|---" * (len(shown) + 3) + "|"]
    for name in NAMES:
        for precision in ("tf32", "bf16"):
            case = cases.get((name, size, precision))
            if case is None:
                out.append(f"| {SHOWN[name]} | {precision} | not run |" + " |" * len(shown))
                continue
            cells = [cell(case, way(column, size)) for column in COLUMNS]
            floors = [p.row["floor"] for p in case.points.values() if "floor" in p.row]
            cells.append(f"{min(floors) / case.plain['peak']:.2f}" if floors else "")
            cells += [cell(case, peer) for peer in PEERS]
            plain = f"{case.plain['ms']:.1f} ms, {case.plain['peak'] / 2**30:.2f} GiB"
            out.append(f"| {SHOWN[name]} | {precision} | {plain} | {' | '.join(cells)} |")
    return out


def beside_peers(cases: dict[Key, Found]) -> list[str]:
    """Ours planned for what a checkpoint around every block takes, where that is less than a third."""
    out = [
        "| network | precision | checkpoint per block | ours, bitwise | ours, reassociated |",
        "|---|---|---|---|---|",
    ]
    for (name, size, precision), case in cases.items():
        peer = case.points.get("checkpoint per block")
        if peer is None or peer.share > 0.33 or size != "1x4096":
            continue
        shown = [f"{peer.slower:.2f}x at {peer.share:.2f}"]
        for norms in (False, True):
            below = [p for p in ours(case) if p.reassociated == norms and p.share <= 1.005 * peer.share]
            best = min(below, key=lambda p: p.slower, default=None)
            shown.append(f"{best.slower:.2f}x at {best.share:.2f}" if best is not None else "")
        out.append(f"| {SHOWN[name]} | {precision} | {' | '.join(shown)} |")
    return out


def ours(case: Found) -> list[Point]:
    return [p for p in case.points.values() if p.ours]


def norms() -> list[str]:
    out = [
        "| precision | exact | share asked | step ms | over plain | host ms | peak of plain | predicted peak |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    found = json.loads((HERE / "results" / NORMS).read_text())["rows"]
    plain = {r["precision"]: r for r in found if r["how"] == "plain"}
    for r in found:
        base = plain[r["precision"]]
        share = r["peak_bytes"] / base["peak_bytes"]
        predicted = f"{r['predicted_peak_bytes'] / base['peak_bytes']:.3f}" if "predicted_peak_bytes" in r else ""
        out.append(
            f"| {r['precision']} | {r['how']} | {r.get('share') or '–'} | {r['ms']:.1f} | "
            f"{r['ms'] / base['ms']:.3f}x | {r['host_ms']:.1f} | {share:.3f} | {predicted} |"
        )
    return out


def replaced(text: str, mark: str, lines: list[str]) -> str:
    """The text with these lines between the mark and its end."""
    begin, end = f"<!-- {mark} -->", "<!-- end -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{tail}"


def told(cases: dict[Key, Found]) -> None:
    """What is missing, above its budget, slower than its aim, or beaten."""
    for size, aims in AIMS.items():
        for name in NAMES:
            for precision in ("tf32", "bf16"):
                label, case = f"{name}-{size}-{precision}", cases.get((name, size, precision))
                if case is None:
                    print(f"{label}: not run")
                    continue
                wanted = [way(c, size) for c in COLUMNS if "re" not in c or name not in ("vgg19", "convnext_tiny")]
                gone = [w for w in (*wanted, *PEERS) if w not in case.points]
                print(f"{label}: missing {[(w, case.missed.get(w, '')[:60]) for w in gone]}") if gone else None
                old = [p.how for p in case.points.values() if p.old]
                print(f"{label}: of older runs {old}") if old else None
                for column, aim in aims.items():
                    point = case.points.get(way(column, size))
                    if point is not None and (point.slower > aim or not point.within):
                        print(f"{label}: {point.how} {point.slower:.3f}x at {point.share:.3f}, aim {aim}")
                for peer in unbeaten(case):
                    print(f"{label}: nothing beats {peer.how}, {peer.slower:.2f}x at {peer.share:.2f}")


def main() -> None:
    readme, cases = HERE / "README.md", results()
    text = readme.read_text()
    tables = {
        "large": table(cases, "1x4096"),
        "small": table(cases, "32x224"),
        "peers": beside_peers(cases),
        "norms": norms(),
    }
    for mark, lines in tables.items():
        text = replaced(text, mark, lines) if f"<!-- {mark} -->" in text else text
    readme.write_text(text)
    (HERE / "frontier-1x4096.svg").write_text(picture(cases, "1x4096", "One image of 4096 px, NVIDIA H200"))
    (HERE / "frontier-32x224.svg").write_text(picture(cases, "32x224", "A batch of 32 at 224 px, NVIDIA H200"))
    told(cases)


if __name__ == "__main__":
    main()
