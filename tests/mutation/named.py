"""Defects that quick tests once did not notice, each put in by hand: `python -m tests.mutation --named`.

A defect is the file, what stands there (once in the file) and what is put there instead.
"""

from __future__ import annotations

from pathlib import Path

from tests.mutation.defects import Mutant

BACK = "begin = max(now, evicted.get(action.value, now))"
CONVERGED = "(4 * eps * size + eps * eps * size.amax())"
KILLED = "test_nothing_is_lost_beyond_the_last_checkpoint_when_a_rank_is_killed"
TESTS = {
    "memory/replay/replay_buffer.py": "tests/memory/test_replays.py",
    "memory/saved_tensors/saved_buffer.py": "tests/memory/saved_tensors/test_managed_forward.py",
    "memory/saved_tensors/managed_forward.py": "tests/memory/test_replays.py",
    "planner/pipeline/search.py": "tests/planner/test_choosing.py",
    "planner/memory/evaluate.py": "tests/planner/test_evaluate.py",
    "planner/memory/copy_schedule.py": "tests/planner/test_evaluate.py tests/planner/memory/test_disk_overflow.py",
    "cost/predicted/step_memory.py": "tests/cost/test_sums_of_gradients.py",
    "program/simulator/simulate.py": "tests/program/test_waiting.py",
    "program/simulator/script_time.py": "tests/program/test_waiting.py",
    "run/engine/update.py": "tests/run/test_branching.py",
    "stream/plan/tiles.py": "tests/stream/plan/test_tiles.py",
    "scan/backward.py": "tests/scan/test_settling.py",
    "graph/record/recorder.py": "tests/graph/test_memory_format_of_writes.py",
    "train/position.py": "tests/train/test_position.py",
    "report/frontier.py": "tests/report/test_frontier_picture.py",
    "train/application.py": "tests/train/test_seeds.py",
    "infer/process_memory.py": "tests/infer/test_process_memory.py",
    "infer/palette.py": "tests/infer/test_palette.py",
    "report/graph_drawing/shading.py": "tests/report/graph_drawing/test_left_to_right.py",
    "report/graph_drawing/svg.py": "tests/report/graph_drawing/test_svg.py",
    "report/run.py": "tests/report/test_evaluation.py",
    "run/ranks/faults.py": "tests/run/ranks/test_culprit.py",
    "graph/reads/snapshot.py": "tests/graph/reads/test_snapshot.py",
    "stream/plan/step_figures.py": "tests/stream/plan/test_step_figures.py",
    "stream/plan/step_document.py": "tests/stream/test_within.py",
    "stream/execute/untiled_tail.py": "tests/stream/test_within.py",
    "whatif/scaling.py": "tests/whatif/test_data_parallel.py",
    "whatif/elsewhere.py": "tests/whatif/test_answer.py",
    "whatif/recording.py": "tests/whatif/test_answer.py",
    "scan/study/jacobian_scan.py": "tests/scan/study/test_jacobian_scan.py",
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
    ("program/simulator/script_time.py", BACK, "begin = now"),
    ("run/engine/update.py", "row[total] = float(p_has)", "row[total] = 1.0"),
    ("run/engine/update.py", "row[total] = float(p_has)", "row[total] = 0.0"),
    ("stream/plan/tiles.py", "or any(tile[a] for a in lacking)", ""),
    ("scan/backward.py", CONVERGED, CONVERGED.replace("4 *", "4000 *", 1)),
    ("graph/record/recorder.py", "elif self.real and name in _EXPORTS:", "elif False:"),
    ("graph/record/recorder.py", "after |= self._memories.write(name, written)", "self._memories.write(name, written)"),
    ("train/position.py", "if math.isfinite(loss):", "if True:"),
    ("report/frontier.py", "axes.at(nbytes / unit, axes.y.low)", "axes.at(nbytes * unit, axes.y.low)"),
    ("report/frontier.py", "entries += [entry for _, _, entry in marks]", "pass"),
    ("train/application.py", "    random.seed(seed)\n    np", "    np"),
    ("train/application.py", "np.random.seed(seed % 2**32)", "pass"),
    ("infer/process_memory.py", "self._thread.start()", "pass"),
    ("infer/palette.py", "np.arange(count) // len(_CLASSES)", "np.arange(count) * len(_CLASSES)"),
    ("run/engine/engine.py", "return self.engine_state.load(path)", 'raise CheckpointError("never")'),
    ("run/engine/engine.py", "return self.engine_state.load(path)", "return None"),
    ("planner/memory/copy_schedule.py", "overflow.returned(buffer, free_s)", "pass"),
    ("report/graph_drawing/shading.py", "return _added(graph, moved)", "return _added(moved, graph)"),
    ("report/graph_drawing/svg.py", "for kind in COLOURS if kind in used]", "for kind in COLOURS if kind not in used]"),
    ("report/graph_drawing/svg.py", 'items.append(("", f"{count(parameters)} parameters"))', "pass"),
    ("report/run.py", "_thumbnail(folder, name)) is not None}", "_thumbnail(folder, name)) is None}"),
    (
        "run/ranks/faults.py",
        "                continue\n            then = was",
        "                break\n            then = was",
    ),
    ("graph/reads/snapshot.py", "> _MOST:\n                return False", "> _MOST:\n                return True"),
    ("stream/plan/step_figures.py", "if n.output in plan.needs]", "if n.output not in plan.needs]"),
    ("stream/plan/step_document.py", 'lines.append("  maps between passes made again from the image")', "pass"),
    (
        "stream/execute/untiled_tail.py",
        "except PlanError:\n                    continue",
        "except PlanError:\n                    break",
    ),
    ("whatif/scaling.py", 'parameter.split(".")[0]', 'parameter.split(".")[-1]'),
    ("whatif/elsewhere.py", "simulated.step_s * low", "simulated.step_s / low"),
    ("whatif/recording.py", "_times(measured.lead_s, target.lead_s", "_times(target.lead_s, measured.lead_s"),
    ("scan/study/jacobian_scan.py", '_check_kind(matrix, gradient, f"jacobian {i}")', "pass"),
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
