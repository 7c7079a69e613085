"""Write the README's list of claims from stored results, check that it is current, or measure a reduced set again.

    python -m benchmarks.claims                       print the claims
    python -m benchmarks.claims --write README.md     put them between the markers
    python -m benchmarks.claims --rerun DIR           about ten minutes on a GPU: claim, stored figure, today's

The dates and commits of results are kept in benchmarks/stored.json with a digest of each file, so that a list is
current if and only if the results are those it was made from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.claims.figures import rows_of
from benchmarks.claims.registry import CLAIMS, ROOT, Claim

STORED = ROOT / "benchmarks" / "stored.json"
BEGIN, END = "<!-- claims: python -m benchmarks.claims --write README.md -->", "<!-- end of claims -->"


def read(path: Path) -> Any:
    """A result: a document, or rows by line."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines() if line]
    return json.loads(path.read_text())


def found(claim: Claim, paths: Iterable[Path]) -> dict[str, Any]:
    """The figures of a claim."""
    return claim.figures([read(path) for path in paths])


def alike(claim: Claim, today: Iterable[Path]) -> list[Any]:
    """The stored documents with only those rows that were measured today too."""

    def name(row: Any) -> tuple[Any, ...]:
        return tuple(row.get(part) for part in claim.same)

    there = {name(row) for row in rows_of(read(path) for path in today)}
    return [{"rows": [row for row in rows_of([read(path)]) if name(row) in there]} for path in claim.paths]


def line(claim: Claim, stored: dict[str, Any]) -> str:
    """A claim as a line of the list, with the date and the commit of its newest result."""
    newest = stored[claim.paths[-1].relative_to(ROOT).as_posix()]
    link = f"([{claim.benchmark}](benchmarks/{claim.benchmark}))"
    return f"- {claim.sentence.format(**found(claim, claim.paths))} · {newest['date']}, {newest['commit']} {link}"


def listed(stored: dict[str, Any]) -> str:
    """All claims that have results."""
    return "\n".join(line(claim, stored) for claim in CLAIMS if claim.paths)


def digests() -> dict[str, dict[str, str]]:
    """Every result that a claim rests on: its digest, and the date and commit of when it was stored."""
    known = json.loads(STORED.read_text()) if STORED.exists() else {}
    now = {}
    for path in sorted({path for claim in CLAIMS for path in claim.paths}):
        name = path.relative_to(ROOT).as_posix()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        if known.get(name, {}).get("digest") == digest:
            now[name] = known[name]
            continue
        told = subprocess.run(
            ["git", "log", "-1", "--diff-filter=AM", "--format=%h", "--", name],
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout.strip()
        date = re.search(r"\d{4}-\d\d-\d\d", path.name)
        now[name] = {"digest": digest, "date": date[0] if date else time.strftime("%Y-%m-%d"), "commit": told or "new"}
    return now


def written(text: str, claims: str) -> str:
    """A page with the claims between the markers."""
    before, _, rest = text.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise SystemExit(f"the page has no markers: put {BEGIN!r} and {END!r} where the claims go")
    return f"{before}{BEGIN}\n{claims}\n{END}{after}"


def measured_again(claim: Claim, folder: Path, seconds: float) -> dict[str, Any]:
    """Run what a claim names: today's figures, or why there are none, and the stored ones of the same rows."""
    if claim.rerun is None:
        return {"today": f"not rerun: {claim.why_not}"}
    if seconds < 20:
        return {"today": "no time was left"}
    out = folder / claim.benchmark
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, *(part.replace("{out}", str(out)) for part in claim.rerun.command)]
    with (out / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(min(seconds, claim.rerun.seconds))
        except subprocess.TimeoutExpired:  # what was written until then counts
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    paths = sorted(out.glob(claim.rerun.writes))
    if not paths:
        return {"today": f"nothing was written: see {out / 'log.txt'}"}
    try:
        figures = found(claim, paths)
        row = {"today": shown(claim, figures), "figures": figures}
        if claim.same and claim.paths:
            row["stored_alike"] = shown(claim, claim.figures(alike(claim, paths)))
        return row
    except Exception as error:
        return {"today": f"{type(error).__name__}: {error}"}


def shown(claim: Claim, figures: dict[str, Any]) -> str:
    """Figures in short, without the parts whose figures are missing."""
    parts = claim.short.format_map(_Missing(figures)).split("; ")
    return "; ".join(part for part in parts if "nan" not in part)


class _Missing(dict[str, Any]):
    """A rerun need not have all figures."""

    def __missing__(self, name: str) -> Any:
        return float("nan")


def rerun(folder: Path, only: list[str], seconds: float) -> None:
    """Measure all claims again, as many as there is time for, and print stored figures beside today's."""
    folder.mkdir(parents=True, exist_ok=True)
    end, rows = time.monotonic() + seconds, []
    for claim in CLAIMS:
        if only and claim.benchmark not in only:
            continue
        row: dict[str, Any] = {"claim": claim.benchmark, "stored_alike": ""}
        row["stored"] = shown(claim, found(claim, claim.paths)) if claim.paths else "nothing stored yet"
        begin = time.monotonic()
        row |= measured_again(claim, folder, end - begin)
        row["seconds"] = time.monotonic() - begin
        rows.append(row)
        (folder / "claims.json").write_text(json.dumps(rows, indent=1))
        print(f"{claim.benchmark} ({row['seconds']:.0f} s)\n  stored {row['stored']}", flush=True)
        print(f"  alike  {row['stored_alike']}\n  today  {row['today']}", flush=True)
    lines = ["| claim | stored | stored, of today's rows | today |", "|---|---|---|---|"]
    lines += [f"| {row['claim']} | {row['stored']} | {row['stored_alike']} | {row['today']} |" for row in rows]
    (folder / "claims.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    parser.add_argument("--rerun", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=580)
    given = parser.parse_args()
    if given.rerun:
        rerun(given.rerun.resolve(), given.only, given.seconds)
        return
    stored = digests()
    if given.write:
        STORED.write_text(json.dumps(stored, indent=1) + "\n")
        given.write.write_text(written(given.write.read_text(), listed(stored)))
    else:
        print(listed(stored))


if __name__ == "__main__":
    main()
