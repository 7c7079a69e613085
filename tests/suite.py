"""Every test but those of a GPU, slow ones included, as one command: `make test-all`.

The tests of each folder run in processes of their own, so that hours of tests do not share one process' memory, and
what is done survives an interruption: the outcome of each part is written as soon as it is known, and the same command
on the same source goes on with the first part that has not passed. The table of all parts, dated and with its commit,
is dist/test-all.md; what pytest printed lies beside it.

    python -m tests.suite             every part that has not passed yet
    python -m tests.suite memory run  these parts, whatever they did before
    python -m tests.suite --again     every part, from the start
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist" / "test-all"
KERNELS = (
    "tests/kernels",
    "tests/scan/kernels",
    "tests/fusion/test_kernels.py",
    "tests/memory/encode/test_byte_index_pool.py",
    "tests/stream/execute/test_conv_epilogue.py",
)
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed)")
NO_TESTS = 5  # pytest's exit status where everything was deselected


def parts() -> dict[str, list[str]]:
    """Name of each part and pytest's arguments for it."""
    folders = sorted(p.name for p in (ROOT / "tests").iterdir() if any(p.rglob("test_*.py")))
    loose = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").glob("test_*.py"))
    chosen = {"interpreted kernels": ["-m", "kernel", *KERNELS], "top": ["-m", "not gpu and not kernel", *loose]}
    return chosen | {name: ["-m", "not gpu and not kernel", f"tests/{name}"] for name in folders}


def source() -> str:
    """The commit, and a digest of what was changed since."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    changes = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, capture_output=True).stdout
    return commit.strip() + ("+" + hashlib.sha256(changes).hexdigest()[:8] if changes else "")


def run(name: str, arguments: list[str], workers: int) -> dict[str, object]:
    """One part's outcome: counts by word, seconds, whether pytest was content."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if name == "interpreted kernels":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "--durations=30", *arguments]
    began = time.monotonic()
    with (DIST / f"{name}.log").open("w", encoding="utf-8") as log:
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                print(line, end="", flush=True)
    return counted(DIST / f"{name}.log") | {
        "seconds": round(time.monotonic() - began),
        "ok": process.returncode in (0, NO_TESTS),
    }


def counted(log: Path) -> dict[str, object]:
    """How many tests passed, failed and so on: pytest's last line that says so."""
    said = [found for line in log.read_text(encoding="utf-8").splitlines() if (found := COUNT.findall(line))]
    return {word: int(number) for number, word in said[-1]} if said else {}


def table(done: dict[str, dict[str, object]], of: str) -> str:
    words = ("passed", "skipped", "failed", "seconds")
    lines = [f"Every test but those of a GPU, {time.strftime('%Y-%m-%d')}, commit {of}.", ""]
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
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest (2)")
    options = parser.parse_args()
    every, of = parts(), source()
    if unknown := [name for name in options.parts if name not in every]:
        parser.error(f"no part is called {unknown[0]}; there are {', '.join(every)}")
    DIST.mkdir(parents=True, exist_ok=True)
    kept = DIST / "done.json"
    stored = json.loads(kept.read_text()) if kept.exists() and not options.again else {}
    done: dict[str, dict[str, object]] = stored.get("parts", {}) if stored.get("source") == of else {}
    for name in options.parts or [n for n in every if not done.get(n, {}).get("ok")]:
        print(f"== {name}", flush=True)
        done[name] = run(name, every[name], options.workers)
        ordered = {n: done[n] for n in every if n in done}
        kept.write_text(json.dumps({"source": of, "parts": ordered}, indent=1))
        (DIST.parent / "test-all.md").write_text(table(ordered, of))
    print(table({n: done[n] for n in every if n in done}, of))
    return 0 if all(row["ok"] for row in done.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
