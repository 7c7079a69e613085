"""Draw defects and try each on the quick tests that reach it.

    make mutants                                     300 mutants, table in dist/mutants.md
    python -m tests.mutation --count 40 --packages planner cost --seed 7
    python -m tests.mutation --tests program planner     what these folders of tests notice
    python -m tests.mutation --named                     defects that once were not noticed
    python -m tests.mutation --minutes 8                 a piece of it; the same command goes on where it stopped
    python -m tests.mutation --processes 14 --minutes 9  on a machine with 16 cores

First all quick tests run once, to know what each reaches; that is kept in dist/mutation until a file of tests changes.
Each mutant's end is a line of dist/mutants.jsonl as soon as it is known.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from tests.mutation.defects import LOOSE, Mutant, draw
from tests.mutation.named import named
from tests.mutation.trial import ROOT, Tests

IMPORTED = "torch torch._dynamo torch.distributed pytest numpy scipy.optimize scipy.sparse sympy typer rich".split()
"""What takes seconds to import and is no part of what is tested: forks have it."""
_LATE_S = 60.0
"""So long after its time a process may be busy with a last file of tests, or a last mutant."""
ENDS = ("killed", "survived", "unreached")


def table(mutants: list[Mutant]) -> str:
    """What was killed, by package, and those that were not."""
    lines = ["| package | mutants | killed | survived | unreached |", "|---|---|---|---|---|"]
    rows = {p: [m for m in mutants if m.package == p] for p in sorted({m.package for m in mutants})}
    for name, of in [*rows.items(), ("all", mutants)]:
        ends = [sum(m.end == end for m in of) for end in ENDS]
        lines.append(f"| {name} | {len(of)} | {ends[0]} ({ends[0] / max(len(of), 1):.0%}) | {ends[1]} | {ends[2]} |")
    lines += ["", "| not killed | defect | becomes | tests |", "|---|---|---|---|"]
    for m in sorted(mutants, key=lambda m: (m.file, m.line)):
        if m.end != "killed":
            shown = m.shown.replace("|", chr(92) + "|")
            lines.append(f"| {m.file}:{m.line} | {m.kind} | `{shown}` | {m.by or m.end} |")
    return "\n".join(lines) + "\n"


def key_of(mutant: Mutant, source: Path) -> str:
    """What a mutant is known by: another content of its file makes it another one."""
    content = hashlib.sha256((source / mutant.file).read_bytes()).hexdigest()[:12]
    return f"{content} {mutant.file} {mutant.start} {mutant.text}"


def left_of(rows: Path, source: Path) -> list[Mutant]:
    """The mutants of a file that nothing has killed, where their files are still the same."""
    names, last = {f.name for f in fields(Mutant)}, dict[str, dict[str, Any]]()
    for row in map(json.loads, rows.read_text().splitlines()):
        last[row["key"]] = row
    found = []
    for key, row in last.items():
        mutant = Mutant(**{name: value for name, value in row.items() if name in names})
        if row["end"] != "killed" and key_of(mutant, source) == key:
            found.append(replace(mutant, end="", by="", time_s=0.0))
    return found


def claimed(claims: Path | None, number: int) -> bool:
    """Whether no other process has taken it."""
    try:
        if claims is not None:
            (claims / str(number)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def started(processes: int, minutes: float, out: Path, arguments: list[str]) -> None:
    """Have several processes watch the tests, at most half of the time, and then try mutants; gather their rows."""
    began, claims = time.monotonic(), out.with_suffix(".claims")
    shutil.rmtree(claims, ignore_errors=True)
    claims.mkdir(parents=True)
    gathered = out.with_suffix(".jsonl")
    command = [sys.executable, "-m", "tests.mutation", *arguments, "--processes", "1", "--known", str(gathered)]
    outs = [out.with_name(f"{out.name}-{number}") for number in range(processes)]
    for more, share in ((["--watch"], 0.5), (["--claims", str(claims)], 1.0)):
        left = max(minutes * share - (time.monotonic() - began) / 60, 0.0)
        commands = [[*command, *more, "--minutes", str(left), "--out", str(one)] for one in outs]
        end = time.monotonic() + 60 * left + _LATE_S
        for child in [subprocess.Popen(words, cwd=ROOT) for words in commands]:
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
        print(f"{time.monotonic() - began:.0f} s: {more[0]} has ended", flush=True)
    with gathered.open("a") as file:
        for rows in (one.with_suffix(".jsonl") for one in outs):
            file.write(rows.read_text() if rows.exists() else "")
            rows.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests per mutant, at most")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop then; the same command goes on")
    parser.add_argument("--packages", nargs="*", default=[])
    parser.add_argument(
        "--tests", nargs="*", default=[], help=f"folders or files of tests ({LOOSE}: those beside them); all"
    )
    parser.add_argument("--only", nargs="*", default=[], help="of what is drawn, the mutants of these packages alone")
    parser.add_argument("--records", type=Path, default=ROOT / "dist" / "mutation", help="keeps what each test reaches")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "mutants")
    parser.add_argument("--file-seconds", type=float, default=1e9, help="of tests per file while watching, at most")
    parser.add_argument("--part", default="0/1", help="0/2 and 1/2 for two processes with an --out each")
    parser.add_argument("--processes", type=int, default=1, help="each with a copy of the repository beside --out")
    parser.add_argument("--claims", type=Path, help="a folder by which processes agree on who tries what")
    parser.add_argument("--of", type=Path, help="try the mutants of a file of rows that were not killed, and draw none")
    parser.add_argument("--known", type=Path, help="a file of rows of mutants that need not be tried again")
    parser.add_argument("--again", action="store_true", help="forget what was tried before")
    parser.add_argument("--watch", action="store_true", help="only find out what each test reaches")
    parser.add_argument("--named", action="store_true", help="the defects of tests/mutation/named.py")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    given.out, given.records = given.out.resolve(), given.records.resolve()
    given.records.mkdir(parents=True, exist_ok=True)
    if given.processes > 1:
        started(given.processes, given.minutes, given.out, sys.argv[1:])
    os.environ.setdefault("OUTCORE_LONG", "all")
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported; tests of kernels set it again
    for name in IMPORTED:
        __import__(name)
    del os.environ["TRITON_INTERPRET"]
    tests = Tests(given.out.with_suffix(".tree"), given.records, given.tests)
    if not given.named:
        known_in_time = given.claims or given.processes > 1 or tests.watch(until, given.file_seconds)
        if given.watch or not known_in_time:
            return
        tests.load()
    rows = given.out.with_suffix(".jsonl")
    if given.again:
        rows.unlink(missing_ok=True)
    files = [path for path in (given.known, rows) if path is not None and path.exists()]
    known = {row["key"]: row for path in files for row in map(json.loads, path.read_text().splitlines())}
    source, done = tests.tree / "src" / "outcore", list[Mutant]()
    if given.of is not None:
        drawn = left_of(given.of, source)
    else:
        drawn = named(source) if given.named else draw(source, given.count, given.packages, given.seed)
    part, parts = map(int, given.part.split("/"))
    for number, mutant in list(enumerate(drawn))[part::parts]:
        if given.only and mutant.package not in given.only:
            continue
        key = key_of(mutant, source)
        if key in known:
            mutant.end, mutant.by, mutant.time_s = (known[key][name] for name in ("end", "by", "time_s"))
        elif time.monotonic() > until or given.processes > 1 or not claimed(given.claims, number):
            continue
        else:
            tests.try_out(mutant, given.seconds)
            with rows.open("a") as out:
                print(json.dumps(asdict(mutant) | {"key": key, "seed": given.seed}), file=out)
            print(f"{mutant.end:9} {mutant.time_s:5.1f} s  {mutant.file}:{mutant.line}  {mutant.shown}", flush=True)
        done.append(mutant)
    given.out.with_suffix(".md").write_text(table(done))
    print(table(done))


if __name__ == "__main__":
    main()
