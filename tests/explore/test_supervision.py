"""What a page is told of its worker: pieces, sizes, answers, limits; with a worker that starts in no time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from outcore.errors import OutcoreError
from outcore.explore import supervisor as module
from outcore.explore.parts import ExploreSettings
from outcore.explore.supervisor import Supervisor, WorkerLimits

PATIENCE_S = 30


@pytest.fixture(autouse=True)
def _small_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORKER", "tests.explore.small_worker")
    monkeypatch.setattr(module, "_EVERY_S", 0.02)


def supervised(
    job: str,
    act: Callable[[Supervisor], Awaitable[None]],
    limits: WorkerLimits = WorkerLimits(),  # noqa: B008
    **options: Any,
) -> None:
    """Start a worker on a job, wait until it has said what it has to say, and act."""

    async def session() -> None:
        supervisor = Supervisor(ExploreSettings(job, **options), limits, spare=False)
        try:
            await supervisor.start()
            await settled(supervisor)
            await act(supervisor)
        finally:
            await supervisor.close()

    asyncio.run(session())


async def settled(supervisor: Supervisor) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while supervisor.status["kind"] == "busy":
            await asyncio.sleep(0.01)


def test_pieces_files_and_sizes_are_taken_over_and_a_page_gets_all_that_is_known() -> None:
    async def act(supervisor: Supervisor) -> None:
        about = {"batch": 4, "image": None, "resized": False}
        assert supervisor.pieces == {"about": about, "graph": 1, "plans": {"complete": True}}
        assert supervisor.status == {"kind": "", "text": "up to date"} and supervisor.trouble is None
        assert {"/a/job.py", "/a/other.py"} <= supervisor.files
        messages = supervisor.messages()
        first = json.loads(await anext(messages))
        assert first == {"pieces": supervisor.pieces, "status": supervisor.status, "trouble": None}
        await supervisor.resize(8, 512)
        told = [json.loads(await asyncio.wait_for(anext(messages), PATIENCE_S)) for _ in range(4)]
        assert [m["status"]["text"] for m in told] == [
            *("recording the network…", "predicting other sizes…", "searching for plans…", "up to date")
        ]
        assert supervisor.pieces["about"] == {"batch": 8, "image": 512, "resized": True}
        await supervisor.resize(None, None)
        await settled(supervisor)
        assert supervisor.pieces["about"] == about
        supervisor.show_run({"ended": None})
        again = supervisor.messages()
        assert json.loads(await anext(again))["pieces"] == supervisor.pieces | {"run": {"ended": None}}
        await messages.aclose()  # type: ignore[attr-defined]
        await again.aclose()  # type: ignore[attr-defined]
        assert not supervisor._listeners

    supervised("works", act, batch=4)


def test_a_plan_by_hand_is_answered_refused_or_given_up() -> None:
    async def act(supervisor: Supervisor) -> None:
        policy, change = {"a": "keep"}, {"b": "recompute"}
        assert await supervisor.simulate(policy, change) == {"policy": policy, "change": change}
        with pytest.raises(OutcoreError, match="no block 'wrong'"):
            await supervisor.simulate({}, {"wrong": "keep"})
        with pytest.raises(OutcoreError, match=r"no answer within 0.3 s; plans may still be searched for"):
            await supervisor.simulate({}, {"slow": "keep"})
        two = await asyncio.gather(*(supervisor.simulate({}, {"n": str(n)}) for n in range(2)))
        assert [answer["change"] for answer in two] == [{"n": "0"}, {"n": "1"}]
        await supervisor._end_worker()
        with pytest.raises(OutcoreError, match="being recorded; try again"):
            await supervisor.simulate({}, {})

    supervised("works", act, WorkerLimits(answer_s=0.3))


@pytest.mark.parametrize(
    ("job", "limits", "said"),
    [
        ("wrong", WorkerLimits(), "no such layer"),
        ("dies", WorkerLimits(), "exit code 3"),
        ("blocks", WorkerLimits(first_s=0.2), "the job was not recorded within 0.2 s"),
        ("blocks", WorkerLimits(memory_bytes=1 << 20), "it may take 1.0 MiB"),
    ],
)
def test_whatever_happens_to_a_worker_is_said_and_the_last_pieces_stay(
    job: str, limits: WorkerLimits, said: str
) -> None:
    async def act(supervisor: Supervisor) -> None:
        before = dict(supervisor.pieces)
        supervisor.settings, supervisor.limits = ExploreSettings(job), limits
        await supervisor.start()
        await settled(supervisor)
        assert supervisor.trouble is not None and said in supervisor.trouble["message"]
        assert supervisor.status["kind"] == "broken" and supervisor.pieces == before
        if job == "dies":
            assert "out of luck" in supervisor.trouble["trace"]
        supervisor.settings, supervisor.limits = ExploreSettings("works"), WorkerLimits()
        await supervisor.start()
        await settled(supervisor)
        assert supervisor.trouble is None and supervisor.status["kind"] == ""

    supervised("works", act)


def test_a_worker_that_was_started_ahead_takes_over() -> None:
    async def session() -> None:
        supervisor = Supervisor(ExploreSettings("works"), WorkerLimits())
        try:
            await supervisor.start()
            await settled(supervisor)
            async with asyncio.timeout(PATIENCE_S):
                while supervisor._spare is None:
                    await asyncio.sleep(0.01)
            ahead = supervisor._spare
            await supervisor.start()
            assert supervisor._worker is ahead
            await settled(supervisor)
            assert supervisor.trouble is None
        finally:
            await supervisor.close()
        assert ahead.returncode is not None

    asyncio.run(session())


def test_a_step_is_run_one_at_a_time_and_what_ends_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[tuple[Any, str]] = [
        ({"peak": 1}, ""), (None, "time"), (None, "memory of 2147483648"), (None, "code 9"), ({"error": "no room"}, "")
    ]  # fmt: skip
    asked: list[Any] = []

    async def answer_of(name: str, request: Any, *, seconds: float, most_bytes: int) -> tuple[Any, str]:
        asked.append((name, request, seconds, most_bytes))
        await asyncio.sleep(0.01)
        return answers[len(asked) - 1]

    monkeypatch.setattr(module, "answer_of", answer_of)

    async def session() -> None:
        supervisor = Supervisor(ExploreSettings("works", batch=4), WorkerLimits(first_s=7.0, memory_bytes=1 << 30))
        supervisor.size = (8, 64)
        first = asyncio.ensure_future(supervisor.measure({"a": 1}, 99))
        await asyncio.sleep(0)
        with pytest.raises(OutcoreError, match="running already"):
            await supervisor.measure(None, 0)
        assert await first == {"peak": 1}
        for said in ("not done within 7 s", "took 2.0 GiB .* may take 1.0 GiB", "ended with code 9", "no room"):
            with pytest.raises(OutcoreError, match=said):
                await supervisor.measure(None, 0)

    asyncio.run(session())
    name, request, *limits = asked[0]
    assert name == "outcore.explore.measured_step" and limits == [7.0, 1 << 30]
    assert request["plan"] == {"a": 1} and request["needed_bytes"] == 99
    assert (request["settings"]["batch"], request["settings"]["image"]) == (8, 64)


def test_a_worker_may_take_three_quarters_of_the_machine(tmp_path: Path) -> None:
    installed = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert WorkerLimits().most_bytes == pytest.approx(0.75 * 1024 * int(installed.split()[1]), rel=1e-3)
    assert WorkerLimits(memory_bytes=5).most_bytes == 5
