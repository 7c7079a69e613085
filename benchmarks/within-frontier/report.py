"""Write the tables and pictures of README.md from the results, and say what is missing and which aims are missed."""

from __future__ import annotations

from networks import NAMES
from picture import SHOWN, picture
from rows import HERE, PEERS, Found, Key, Point, best, least, results, unbeaten

COLUMNS = {"0.50": (0.5, False), "0.33": (0.33, False), "0.50*": (0.5, True), "0.33*": (0.33, True)}
AIMS = {"1x4096": {0.5: 1.10, 0.33: 1.20, 0.0: 1.40}, "32x224": {0.5: 1.15, 0.33: 1.30}}
"""Share -> time over plain; nought is the least."""


REASONS = {"of the host": "host memory", "compiling": "not compiled", "out of memory": "device full"}


def cell(case: Found, how: str) -> str:
    """Time and memory over plain's, or why there is none."""
    if (point := case.points.get(how)) is not None:
        return shown(point)
    if how == "fairscale offload" and (case.plain["model"] == "densenet121" or "bf16" in case.plain["precision"]):
        return ""
    return next((short for part, short in REASONS.items() if part in case.missed.get(how, "")), "no time")


def shown(point: Point | None) -> str:
    if point is None:
        return "none"
    marks = (
        ("g" if "graphs" in point.how else "")
        + ("c" if "channels_last" in point.how else "")
        + ("†" if point.old else "")
    )
    return f"{point.slower:.2f}x at {point.share:.2f}{marks}"


def table(cases: dict[Key, Found], size: str) -> list[str]:
    """One line per network and precision."""
    heads = [
        "0.50",
        "0.33",
        "least",
        "floor",
        "0.50*",
        "0.33*",
        "checkpoint per block",
        "fairscale",
        "save_on_cpu",
        "compile 0.5",
    ]
    out = ["| network | precision | plain | " + " | ".join(heads) + " |", "|---" * (len(heads) + 3) + "|"]
    for name in NAMES:
        for precision in ("tf32", "bf16"):
            case = cases.get((name, size, precision))
            if case is None:
                out.append(f"| {SHOWN[name]} | {precision} | not run |" + " |" * len(heads))
                continue
            cells = [shown(best(case, share, reassociated=norms)) for share, norms in COLUMNS.values()]
            if not any(p.reassociated for p in case.points.values()):  # nothing there could round otherwise
                cells[2:] = ["", ""]
            floors = [p.row["floor"] for p in case.points.values() if "floor" in p.row and not p.reassociated]
            floor = f"{min(floors) / case.plain['peak']:.2f}" if floors else ""
            cells[2:2] = [shown(least(case)), floor]
            cells += [cell(case, peer) for peer in PEERS]
            plain = f"{case.plain['ms']:.1f} ms, {case.plain['peak'] / 2**30:.2f} GiB"
            out.append(f"| {SHOWN[name]} | {precision} | {plain} | {' | '.join(cells)} |")
    return out


def beside(cases: dict[Key, Found], how: str, sizes: tuple[str, ...], most: float = 1.0) -> list[str]:
    """A peer, where it takes no more than a share of the memory, and the fastest of ours that takes no more than it."""
    out = [f"| network | size | precision | {how} | ours, bitwise | ours, reassociated |", "|---" * 6 + "|"]
    for name, size, precision in ((n, s, p) for s in sizes for n in NAMES for p in ("tf32", "bf16")):
        case = cases.get((name, size, precision))
        peer = case.points.get(how) if case is not None else None
        if case is None or peer is None or peer.share > most:
            continue
        ours = [shown(best(case, peer.share, reassociated=norms)) for norms in (False, True)]
        out.append(f"| {SHOWN[name]} | {size} | {precision} | {shown(peer)} | {' | '.join(ours)} |")
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
                gone = [w for w in PEERS if w not in case.points]
                print(f"{label}: missing {[(w, case.missed.get(w, '')[:60]) for w in gone]}") if gone else None
                for share, aim in aims.items():
                    point = best(case, share, reassociated=False) if share else least(case)
                    if point is None or point.slower > aim:
                        print(f"{label}: {share or 'least'} {shown(point)}, aim {aim}")
                over = [f"{p.how} {p.share:.3f}" for p in case.points.values() if not p.within]
                print(f"{label}: above budget {over}") if over else None
                for peer in unbeaten(case):
                    print(f"{label}: nothing beats {peer.how}, {peer.slower:.2f}x at {peer.share:.2f}")


def main() -> None:
    readme, cases = HERE / "README.md", results()
    text = readme.read_text()
    tables = {
        "large": table(cases, "1x4096"),
        "small": table(cases, "32x224"),
        "checkpoints": beside(cases, "checkpoint per block", ("1x4096",), 0.33),
        "compiled": beside(cases, "compile budget 0.5", ("1x4096", "32x224")),
    }
    for mark, lines in tables.items():
        text = replaced(text, mark, lines) if f"<!-- {mark} -->" in text else text
    readme.write_text(text)
    (HERE / "frontier-1x4096.svg").write_text(picture(cases, "1x4096", "One image of 4096 px, NVIDIA H200"))
    (HERE / "frontier-32x224.svg").write_text(picture(cases, "32x224", "A batch of 32 at 224 px, NVIDIA H200"))
    told(cases)


if __name__ == "__main__":
    main()
