"""Who may ask the live page's server for what: only this machine, only with the token, and never for a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("watchfiles")

from starlette.testclient import TestClient

from outcore.errors import OutcoreError
from outcore.explore.parts import ExploreSettings
from outcore.explore.server import ExploreServer, _stream, _unless, explore_app
from outcore.explore.supervisor import Supervisor
from tests.explore.jobs import write

TOKEN = "a-token-of-a-test"


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    """The application before its job is looked at."""
    settings = ExploreSettings(str(write(tmp_path)), machine="v100")
    return TestClient(explore_app(Supervisor(settings), TOKEN), base_url="http://127.0.0.1")


def test_the_page_is_there_for_whoever_has_the_token(client: TestClient) -> None:
    answer = client.get(f"/{TOKEN}/")
    assert answer.status_code == 200 and 'data-live="true"' in answer.text
    assert answer.headers["x-frame-options"] == "DENY" and answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/wrong/", "/wrong/events", f"/{TOKEN}x/", f"/{TOKEN}", "/bundle.json", f"/{TOKEN}/job.py"),
        *(f"/{TOKEN}/../job.py", f"/{TOKEN}/%2e%2e/%2e%2e/etc/passwd", f"/{TOKEN}//etc/passwd"),
        *(f"/{TOKEN}/source?path=/etc/passwd", "/etc/passwd"),
    ],
)
def test_everything_else_is_not_found(client: TestClient, path: str) -> None:
    answer = client.get(path, follow_redirects=False)
    assert answer.status_code == 404 and "outcore" not in answer.text


def test_another_host_name_and_another_origin_are_refused(client: TestClient) -> None:
    assert client.get(f"/{TOKEN}/", headers={"host": "evil.example"}).status_code == 400
    asked = {"policy": {}, "change": {}}
    foreign = client.post(f"/{TOKEN}/simulate", json=asked, headers={"origin": "http://evil.example"})
    assert foreign.status_code == 403
    assert client.post("/wrong/simulate", json=asked).status_code == 404
    assert client.get(f"/{TOKEN}/simulate").status_code == 405


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"[]", "policy and change"),
        (b'{"policy": {}, "change": {"a": 1}}', "policy and change"),
        (b'{"policy": "x", "change": {}}', "policy and change"),
        (b'"' + b"x" * (1 << 20) + b'"', "too large"),
        (b'{"policy": {}, "change": {}}', "try again"),
    ],
)
def test_a_request_that_is_none_says_why(client: TestClient, body: bytes, said: str) -> None:
    answer = client.post(f"/{TOKEN}/simulate", content=body)
    assert answer.status_code == 400 and said in json.loads(answer.text)["error"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("size", b"[]", "batch and image"),
        ("size", b'{"batch": 0, "image": null}', "from 1 to"),
        ("size", b'{"batch": "4; rm -rf", "image": null}', "batch and image"),
        ("size", b'{"batch": 4}', "batch and image"),
        ("size", b'{"batch": true, "image": 1}', "batch and image"),
        ("measure", b"[]", "plan, a document or null"),
        ("measure", b'{"plan": "os.system", "needed_bytes": 1}', "plan, a document or null"),
        ("measure", b'{"plan": null, "needed_bytes": "1"}', "plan, a document or null"),
    ],
)
def test_sizes_and_steps_are_asked_for_with_numbers_and_plans(
    client: TestClient, path: str, body: bytes, said: str
) -> None:
    answer = client.post(f"/{TOKEN}/{path}", content=body)
    assert answer.status_code == 400 and said in json.loads(answer.text)["error"]
    assert client.post(f"/wrong/{path}", content=body).status_code == 404
    assert client.post(f"/{TOKEN}/{path}", content=body, headers={"origin": "http://evil.example"}).status_code == 403


def test_a_server_is_on_this_machine_only_and_has_its_own_token(tmp_path: Path) -> None:
    settings = ExploreSettings(str(write(tmp_path)))
    one, two = ExploreServer(settings), ExploreServer(settings)
    try:
        assert one.token != two.token and len(one.token) >= 20
        assert one.socket.getsockname()[0] == "127.0.0.1" and one.address.startswith("http://127.0.0.1:")
        with pytest.raises(OutcoreError, match="is taken"):
            one.socket.listen()
            ExploreServer(settings, port=one.socket.getsockname()[1])
    finally:
        one.socket.close()
        two.socket.close()


def test_a_server_that_leaves_ends_what_pages_wait_for(tmp_path: Path) -> None:
    async def wait() -> None:
        leaving = asyncio.Event()
        stream = _stream(Supervisor(ExploreSettings(str(write(tmp_path)))), leaving)
        assert (await anext(stream)).startswith("data: ")
        following, answer = asyncio.ensure_future(anext(stream)), _unless(leaving, asyncio.Event().wait())  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        leaving.set()
        assert await asyncio.wait_for(answer, 10) is None
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(following, 10)

    asyncio.run(wait())
