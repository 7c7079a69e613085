"""Defects that quick tests once did not notice, each put in by hand: `python -m tests.mutation --named`.

A defect is the file, what stands there (once in the file) and what is put there instead.
"""

from __future__ import annotations

from pathlib import Path

from tests.mutation.defects import Mutant

BACK = "max(now, self.copied_out[of].get(copy.value, now))"
CONVERGED = "(4 * eps * size + eps * eps * size.amax())"
KILLED = "test_nothing_is_lost_beyond_the_last_checkpoint_when_a_rank_is_killed"
TESTS = {
    "memory/replay/replay_buffer.py": "tests/memory/test_replays.py",
    "memory/saved_tensors/saved_buffer.py": "tests/memory/test_replays.py",
    "memory/saved_tensors/managed_forward.py": "tests/memory/test_replays.py",
    "planner/pipeline/search.py": "tests/planner/test_choosing.py",
    "planner/memory/evaluate.py": "tests/planner/test_evaluate.py",
    "planner/memory/copy_schedule.py": "tests/planner/test_evaluate.py",
    "cost/predicted/step_memory.py": "tests/cost/test_sums_of_gradients.py",
    "program/simulator/simulate.py": "tests/program/test_waiting.py",
    "run/engine/update.py": "tests/run/test_branching.py",
    "stream/plan/tiles.py": "tests/stream/plan/test_tiles.py",
    "scan/backward.py": "tests/scan/test_settling.py",
    "graph/record/recorder.py": "tests/graph/test_memory_format_of_writes.py",
    "train/position.py": "tests/train/test_position.py",
    "run/engine/engine.py": f"tests/run/test_checkpoints.py::{KILLED}",
}
"""By file of the source, the tests that state what it should do."""
NAMED = [
    ("memory/replay/replay_buffer.py", "if memory._version != self.version and", "if False and"),
    ("memory/saved_tensors/saved_buffer.py", "(not self.away and memory._version != self.version)", "False"),
    (
        "memory/saved_tensors/managed_forward.py",
        "before.restore()\n            return self.plainly",
        "return self.plainly",
    ),
    ("planner/pipeline/search.py", "and not best.pipeline.paired and not copies", "and not copies"),
    ("planner/pipeline/search.py", "best.replicas == 1 and not best", "not best"),
    ("planner/pipeline/search.py", "limit -= excess", "limit += excess"),
    ("planner/pipeline/search.py", "limit -= excess", "pass"),
    ("planner/pipeline/search.py", "if c.in_flight <= least]", "if c.in_flight < least]"),
    ("planner/pipeline/search.py", "if c.in_flight <= least]", "]"),
    ("planner/memory/evaluate.py", "room[begins] = buffer.workspace_bytes", "pass"),
    ("planner/memory/evaluate.py", "if not self._any_signs:", "if self._any_signs:"),
    ("planner/memory/copy_schedule.py", "start = max(free_s, clock.forward_end[buffer.last])", "start = free_s"),
    (
        "planner/memory/copy_schedule.py",
        "start = max(free_s, clock.forward_end[buffer.last])",
        "start = clock.forward_end[buffer.last]",
    ),
    ("cost/predicted/step_memory.py", 'self.moment("backward", call.name, size)', "pass"),
    ("cost/predicted/step_memory.py", "if self.sharing[before] == 1 and", "if"),
    ("cost/predicted/step_memory.py", "self.held[before].bytes < size + self.grain:", "True:"),
    ("program/simulator/simulate.py", "nbytes, max(arrived))", "nbytes, min(arrived))"),
    ("program/simulator/simulate.py", BACK, "now"),
    ("run/engine/update.py", "row[total] = float(p_has)", "row[total] = 1.0"),
    ("run/engine/update.py", "row[total] = float(p_has)", "row[total] = 0.0"),
    ("stream/plan/tiles.py", "or any(tile[a] for a in lacking)", ""),
    ("scan/backward.py", CONVERGED, CONVERGED.replace("4 *", "4000 *", 1)),
    ("graph/record/recorder.py", "elif self.real and name in _EXPORTS:", "elif False:"),
    ("graph/record/recorder.py", "after |= self._memories.write(name, written)", "self._memories.write(name, written)"),
    ("train/position.py", "if math.isfinite(loss):", "if True:"),
    ("run/engine/engine.py", "return self.engine_state.load(path)", 'raise CheckpointError("never")'),
    ("run/engine/engine.py", "return self.engine_state.load(path)", "return None"),
]


def named(source: Path) -> list[Mutant]:
    """The defects, where they stand today."""
    found = []
    for file, old, new in NAMED:
        data = (source / file).read_bytes()
        if data.count(old.encode()) != 1:
            raise ValueError(
                f"{file} has {data.count(old.encode())} times {old!r}; a defect is put where it stands once"
            )
        start = data.index(old.encode())
        line = data.count(b"\n", 0, start) + 1
        found.append(
            Mutant(
                file,
                line,
                "",
                "by hand",
                start,
                start + len(old.encode()),
                new,
                shown=f"{old} -> {new}",
                tests=TESTS[file],
            )
        )
    return found
