"""The page's server: an ASGI application that shows one run, read-only. For `shoal watch`.

    /           the page                    /events     server-sent events: everything at first, then what is new
    /assets/    its script, style, charts   /metrics    the same figures for Prometheus

Every answer forbids the browser to load anything from elsewhere. Whoever listens beyond loopback has a token: a browser gives it once,
in the printed address, and keeps it as a cookie; Prometheus sends it as bearer token. On loopback the Host header is checked, so
that no other site can reach the page through a name of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.dashboard.page import metrics
from shoal.dashboard.page.state import PageState, PeerRow, Reading, StateBuilder
from shoal.dashboard.series import Series, columns

ASSETS = Path(__file__).parent / "assets"
UPDATE_S = 1.0
FIRST_POINTS = 2000  # steps that a browser gets at first, evenly spaced
MOST_READERS = 64  # browsers at once
COOKIE = "shoal_page"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What one event holds. `generation`: of the steps; `whole`: these steps replace all others."""

    generation: int
    whole: bool
    steps: dict[str, list[float | None]]
    state: msgspec.Raw
    peer_fields: tuple[str, ...] = ()


class Feed:
    """The newest state of the run, for all readers. `read` is called at most once in UPDATE_S, and only while somebody reads."""

    def __init__(self, read: Callable[[], Reading], series: Callable[[], Series]) -> None:
        self._read, self._series = read, series
        self._builder = StateBuilder()
        self._lock = asyncio.Lock()
        self._state: PageState | None = None
        self._encoded = b""
        self._read_at_s = float("-inf")
        self.readers = 0

    async def newest(self) -> PageState:
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if self._state is None or now - self._read_at_s >= 0.9 * UPDATE_S:
                reading = await run_in_threadpool(self._read)
                self._state = self._builder.state(reading)
                self._encoded = msgspec.json.encode(self._state)
                self._read_at_s = now
            return self._state

    async def metrics(self) -> bytes:
        state = await self.newest()
        figures = self._series().figures
        return metrics.text(state, figures[-1] if figures else None)

    async def updates(self) -> AsyncIterator[bytes]:
        """Server-sent events for one reader."""
        sent, generation = 0, -1
        while True:
            try:
                await self.newest()
            except (OSError, ValueError) as error:  # the directory was moved, or is being made anew
                yield b"event: trouble\ndata: " + msgspec.json.encode(str(error)) + b"\n\n"
                await asyncio.sleep(UPDATE_S)
                continue
            series = self._series()
            figures, whole = series.figures, series.generation != generation
            update = Update(
                generation=series.generation,
                whole=whole,
                steps=columns(figures if whole else figures[sent:], FIRST_POINTS),
                state=msgspec.Raw(self._encoded),
                peer_fields=PeerRow.__struct_fields__ if whole else (),
            )
            sent, generation = len(figures), series.generation
            yield b"data: " + msgspec.json.encode(update) + b"\n\n"
            await asyncio.sleep(UPDATE_S)


class Guard:
    """Adds HEADERS to every answer and lets in only who has the token, where there is one."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                kept = [pair for pair in message.get("headers", []) if pair[0].decode("latin-1").lower() not in HEADERS]
                message["headers"] = [*kept, *headers]
            await send(message)

        answer = self._refusal(Request(scope)) if self._token else None
        await (answer or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        """None: the request may pass."""
        if self._is_token(request.query_params.get("token", "")) and request.url.path == "/":
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if self._is_token(request.cookies.get(COOKIE, "")) or (kind.lower() == "bearer" and self._is_token(bearer)):
            return None
        return PlainTextResponse("Open the address that `shoal watch` has printed: it holds the token.\n", 401)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(_digest(given), _digest(self._token))


def application(
    read: Callable[[], Reading], series: Callable[[], Series], *, token: str, hosts: list[str]
) -> Starlette:
    """The page of a run. `token`: '' for none; `hosts`: names under which it may be called, ["*"] for any."""
    feed = Feed(read, series)

    async def page(_: Request) -> Response:
        return FileResponse(ASSETS / "index.html")

    async def events(_: Request) -> Response:
        if feed.readers >= MOST_READERS:
            return PlainTextResponse("too many browsers look at this page\n", 503)
        return StreamingResponse(_counted(feed), media_type="text/event-stream")

    async def prometheus(_: Request) -> Response:
        return Response(await feed.metrics(), media_type=metrics.CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/events", events),
            Route("/metrics", prometheus),
            Mount("/assets", StaticFiles(directory=ASSETS)),
        ],
        middleware=[Middleware(Guard, token=token), Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={OSError: _unreadable, ValueError: _unreadable},
    )


async def _counted(feed: Feed) -> AsyncIterator[bytes]:
    feed.readers += 1
    try:
        async for event in feed.updates():
            yield event
    finally:
        feed.readers -= 1


async def _unreadable(_: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", 503)


def _digest(text: str) -> bytes:
    """Of one length, whatever was given."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
