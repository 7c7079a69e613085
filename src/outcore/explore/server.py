"""The live page's server: on this machine only, for whoever has the address.

    GET  /TOKEN/            the page
    GET  /TOKEN/events      pieces of the bundle as they are made (server-sent events)
    POST /TOKEN/simulate    what a step takes with policies changed by hand
    POST /TOKEN/measure     run a step on this machine, and record it
    POST /TOKEN/size        look at another batch and image size

The address has a random token in it; every other path is not found, whatever it is, and there is no way to ask for a
file. Requests under another host name are refused (a page elsewhere may not reach this one by its own name), and so are
posts from another origin. What a page sends is numbers, names of blocks and policies,
and plans, all checked against the network's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outcore.errors import OutcoreError
from outcore.explore.page import explore_page
from outcore.explore.parts import ExploreSettings, default_folder
from outcore.explore.supervisor import Supervisor, WorkerLimits
from outcore.explore.watched_run import watch_run

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["ExploreServer", "explore_app"]

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_MOST_BYTES = 1 << 20
_ALIVE_S = 15.0
_LARGEST = 1 << 20


def explore_app(supervisor: Supervisor, token: str, *, watch: bool = True) -> Starlette:
    """The application around a supervisor, which it starts and ends; `app.state.leaving` ends all answers."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    leaving = asyncio.Event()

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            if not secrets.compare_digest(str(request.path_params["token"]), token):
                return PlainTextResponse("not found", 404, _HEADERS)
            origin = request.headers.get("origin")
            if origin is not None and origin != f"{request.url.scheme}://{request.headers.get('host')}":
                return PlainTextResponse("another origin", 403, _HEADERS)
            response = await _unless(leaving, answer(request)) or PlainTextResponse("the server is leaving", 503)
            response.headers.update(_HEADERS)
            return response

        return checked

    async def show(request: Request) -> Response:
        title = Path(supervisor.settings.job).name  # the pieces come as the first event
        return HTMLResponse(explore_page({"title": title}, live=True))

    async def events(request: Request) -> Response:
        return StreamingResponse(_stream(supervisor, leaving), media_type="text/event-stream")

    async def simulate(request: Request) -> Response:
        try:
            policy, change = _asked(await _body(request))
            return JSONResponse(await supervisor.simulate(policy, change))
        except OutcoreError as error:
            return JSONResponse({"error": str(error)}, 400)

    async def measure(request: Request) -> Response:
        try:
            body = await _body(request)
            plan, needed = (body.get("plan"), body.get("needed_bytes")) if isinstance(body, dict) else (0, 0)
            if not isinstance(plan, dict | None) or not isinstance(needed, int):
                raise OutcoreError("a request has the fields plan, a document or null, and needed_bytes, a number")
            return JSONResponse(await supervisor.measure(plan, needed))
        except OutcoreError as error:
            return JSONResponse({"error": str(error)}, 400)

    async def size(request: Request) -> Response:
        try:
            await supervisor.resize(*_size(await _body(request)))
            return JSONResponse({})
        except OutcoreError as error:
            return JSONResponse({"error": str(error)}, 400)

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        await supervisor.start()
        settings = supervisor.settings
        folder = Path(settings.run) if settings.run else default_folder(settings.job)
        work = [_watch(supervisor), watch_run(folder, supervisor.show_run)] if watch else []
        watching = [asyncio.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await supervisor.close()

    routes = [
        Route("/{token}/", guarded(show), methods=["GET"]),
        Route("/{token}/events", guarded(events), methods=["GET"]),
        Route("/{token}/simulate", guarded(simulate), methods=["POST"]),
        Route("/{token}/measure", guarded(measure), methods=["POST"]),
        Route("/{token}/size", guarded(size), methods=["POST"]),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"], www_redirect=False)
    app = Starlette(routes=routes, middleware=[hosts], lifespan=life)
    app.state.leaving = leaving
    app.router.redirect_slashes = False  # a redirection would say which paths there are
    return app


async def _unless(leaving: asyncio.Event, answer: Awaitable[Response]) -> Response | None:
    """An answer, or none where the server is told to leave before there is one."""
    answering, left = asyncio.ensure_future(answer), asyncio.ensure_future(leaving.wait())
    either: set[asyncio.Future[Any]] = {answering, left}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else None
    finally:
        await _cancel(answering, left)


async def _stream(supervisor: Supervisor, leaving: asyncio.Event) -> AsyncIterator[str]:
    """Server-sent events: a message to an event, and now and then a comment that keeps the connection open."""
    messages = supervisor.messages()
    following: asyncio.Task[str] | None = None
    left = asyncio.ensure_future(leaving.wait())
    try:
        while not leaving.is_set():
            following = following or asyncio.ensure_future(anext(messages))
            either: set[asyncio.Future[Any]] = {following, left}
            done, _ = await asyncio.wait(either, timeout=_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if following in done:
                yield f"data: {following.result()}\n\n"
                following = None
            elif not done:
                yield ": alive\n\n"
    finally:
        await _cancel(left, *([following] if following is not None else []))
        await messages.aclose()  # type: ignore[attr-defined]


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what is not done, and wait for its end."""
    for task in tasks:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await task


async def _body(request: Request) -> Any:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise OutcoreError("the request is too large")
    try:
        return json.loads(body)
    except ValueError:
        raise OutcoreError("the request is not JSON") from None


def _asked(body: Any) -> tuple[dict[str, str], dict[str, str]]:
    parts = [body.get(name) for name in ("policy", "change")] if isinstance(body, dict) else [None, None]
    for part in parts:
        if not isinstance(part, dict) or not all(isinstance(v, str) for v in part.values()):
            raise OutcoreError("a request has the fields policy and change, each a map from names to policies")
    return parts[0], parts[1]  # type: ignore[return-value]


def _size(body: Any) -> tuple[int | None, int | None]:
    """Batch and image, none for the job's own."""
    given = [body.get(name, 0) for name in ("batch", "image")] if isinstance(body, dict) else [0]
    fits = [n is None or (isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= _LARGEST) for n in given]
    if len(given) != 2 or not all(fits):
        raise OutcoreError(f"a request has the fields batch and image, each a number from 1 to {_LARGEST:,} or null")
    return given[0], given[1]


async def _watch(supervisor: Supervisor) -> None:
    """Start again when a file of the job was saved."""
    from watchfiles import awatch

    while True:
        files = set(supervisor.files)
        folders = {str(Path(file).parent) for file in files if Path(file).parent.is_dir()}
        if not folders:
            return
        changed = awatch(*folders, recursive=False, debounce=200, step=50, rust_timeout=1000, yield_on_timeout=True)
        async for changes in changed:
            if any(path in files for _, path in changes):
                await supervisor.start()
            if supervisor.files - files:
                break  # the job imports another file now


class ExploreServer:
    """A server on a free port of this machine, with its address."""

    def __init__(self, settings: ExploreSettings, *, port: int = 0, limits: WorkerLimits | None = None) -> None:
        self.token = secrets.token_urlsafe(18)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind(("127.0.0.1", port))
        except OSError as error:
            self.socket.close()
            raise OutcoreError(f"port {port} of this machine is taken ({error.strerror}); leave out --port") from None
        self.settings, self.limits = settings, limits or WorkerLimits()

    @property
    def address(self) -> str:
        """What to open in the browser."""
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}/{self.token}/"

    def run(self, started: Callable[[], None] | None = None) -> None:
        """Serve until interrupted.

        Args:
            started: called when the page can be opened.
        """
        asyncio.run(self._serve(started))

    async def _serve(self, started: Callable[[], None] | None) -> None:
        import uvicorn

        app = explore_app(Supervisor(self.settings, self.limits), self.token)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, access_log=False)
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[self.socket]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
        if started is not None and not serving.done():
            started()
        while not serving.done():
            if server.should_exit:  # pages that are open would be cut off with a traceback
                app.state.leaving.set()
            await asyncio.wait({serving}, timeout=0.1)
        await serving
