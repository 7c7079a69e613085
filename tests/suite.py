"""Every test but those of a GPU, slow ones included, as one command: `make test-all`.

The tests of each folder run in processes of their own, so that hours of tests do not share one process' memory, and
what is done survives an interruption: the outcome of each part is written as soon as it is known, and the same command
on the same source goes on with the first part that has not passed. The table of all parts, dated and with its commit,
is dist/test-all.md; what pytest printed lies beside it.

    python -m tests.suite             every part that has not passed yet
    python -m tests.suite memory run  these parts, whatever they did before
    python -m tests.suite --again     every part, from the start
    python -m tests.suite --gpu       the tests of a GPU, file by file, four files at a time, then those that need the
                                      device to themselves: dist/test-gpu.md
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
KERNELS = (
    "tests/kernels",
    "tests/scan/kernels",
    "tests/fusion/test_kernels.py",
    "tests/memory/encode/test_byte_index_pool.py",
    "tests/stream/execute/test_conv_epilogue.py",
)
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed)")
ALONE = "alone on the device"
NO_TESTS = 5  # pytest's exit status where everything was deselected


def parts() -> dict[str, list[str]]:
    """Name of each part and pytest's arguments for it."""
    folders = sorted(p.name for p in (ROOT / "tests").iterdir() if any(p.rglob("test_*.py")))
    loose = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").glob("test_*.py"))
    chosen = {"interpreted kernels": ["-m", "kernel", *KERNELS], "top": ["-m", "not gpu and not kernel", *loose]}
    return chosen | {name: ["-m", "not gpu and not kernel", f"tests/{name}"] for name in folders}


def gpu_parts() -> dict[str, list[str]]:
    """The same of the tests of a GPU: each file is a part, since what one leaves in the allocator disturbs the next."""
    files = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in p.read_text(encoding="utf-8")]
    names = [str(p.relative_to(ROOT)) for p in files]
    beside = "gpu and not slow and not alone"
    alone = [str(p.relative_to(ROOT)) for p in files if "mark.alone" in p.read_text(encoding="utf-8")]
    chosen = {n.removeprefix("tests/").replace("/", "."): ["-m", beside, n] for n in names}
    return chosen | {ALONE: ["-m", "gpu and not slow and alone", *alone]}


def source() -> str:
    """The commit, and a digest of what was changed since."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    changes = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, capture_output=True).stdout
    return commit.strip() + ("+" + hashlib.sha256(changes).hexdigest()[:8] if changes else "")


def run(name: str, arguments: list[str], log: Path) -> dict[str, object]:
    """One part's outcome: counts by word, seconds, whether pytest was content."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if name == "interpreted kernels":
        environment["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as lines:
        command = [sys.executable, "-m", "pytest", "--durations=30", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=lines, stderr=subprocess.STDOUT)
    found = counted(log) | {"seconds": round(time.monotonic() - began), "ok": done.returncode in (0, NO_TESTS)}
    print(f"{name}: " + ", ".join(f"{value} {word}" for word, value in found.items() if word != "ok"), flush=True)
    if not found["ok"]:
        print(log.read_text(encoding="utf-8"), flush=True)
    return found


def counted(log: Path) -> dict[str, object]:
    """How many tests passed, failed and so on: pytest's last line that says so."""
    said = [found for line in log.read_text(encoding="utf-8").splitlines() if (found := COUNT.findall(line))]
    return {word: int(number) for number, word in said[-1]} if said else {}


def table(done: dict[str, dict[str, object]], of: str, what: str) -> str:
    words = ("passed", "skipped", "failed", "seconds")
    lines = [f"{what}, {time.strftime('%Y-%m-%d')}, commit {of}.", ""]
    lines += ["| part | " + " | ".join(words) + " |", "|---|" + "---|" * len(words)]
    rows = [(name, [_number(row, word) for word in words]) for name, row in done.items()]
    rows.append(("all", [sum(numbers) for numbers in zip(*(r for _, r in rows), strict=True)]))
    lines += [f"| {name} | " + " | ".join(f"{n:,}" for n in numbers) + " |" for name, numbers in rows]
    return "\n".join(lines) + "\n"


def _number(row: dict[str, object], word: str) -> int:
    """A count of a part; errors, as a worker that died leaves them, count as failed."""
    found = [row.get(w, 0) for w in ((word, "error", "errors") if word == "failed" else (word,))]
    return sum(n for n in found if isinstance(n, int))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="folders of tests/, or 'interpreted kernels', or 'top'"
    )
    parser.add_argument("--again", action="store_true", help="from the start")
    parser.add_argument("--gpu", action="store_true", help="the tests of a GPU alone")
    options = parser.parse_args()
    every, of = gpu_parts() if options.gpu else parts(), source()
    if unknown := [name for name in options.parts if name not in every]:
        parser.error(f"no part is called {unknown[0]}; there are {', '.join(every)}")
    name, what = ("test-gpu", "Tests of a GPU") if options.gpu else ("test-all", "Every test but those of a GPU")
    logs, written = DIST / name, threading.Lock()
    logs.mkdir(parents=True, exist_ok=True)
    kept = logs / "done.json"
    stored = json.loads(kept.read_text()) if kept.exists() and not options.again else {}
    done: dict[str, dict[str, object]] = stored.get("parts", {}) if stored.get("source") == of else {}

    def take(part: str) -> None:
        workers = [] if options.gpu else ["-n", "2", "--dist", "worksteal"]
        outcome = run(part, [*workers, *every[part]], logs / f"{part}.log")
        with written:
            done[part] = outcome
            ordered = {n: done[n] for n in every if n in done}
            kept.write_text(json.dumps({"source": of, "parts": ordered}, indent=1))
            (DIST / f"{name}.md").write_text(table(ordered, of, what))

    asked = options.parts or [n for n in every if not done.get(n, {}).get("ok")]
    with ThreadPoolExecutor(4 if options.gpu else 1) as pool:
        list(pool.map(take, (n for n in asked if n != ALONE)))
    for part in asked:
        if part == ALONE:
            take(part)
    print((DIST / f"{name}.md").read_text())
    return 0 if all(row["ok"] for row in done.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
