"""ASGI middleware in front of the routes: API key, origin, request size, concurrent requests.

A browser may be misled by pages of other sites, so there is no CORS and no cross-site POST, and a
server on a loopback address accepts loopback host names only (against DNS rebinding). After a body
was refused, what the client is still sending is drained for a moment, so that it sees the response,
and then the connection is closed.
"""

import asyncio
import hmac
import json
from contextlib import suppress
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from billfish.server.errors import ApiError

LARGEST_HEAD = 32 * 1024  # bytes of a request's line and headers
LARGEST_BODY = 8 * 2**20
BODY_SECONDS = 30.0
DRAINED = (2.0, 2 * LARGEST_BODY)  # seconds and bytes, of a body that was refused
MAX_DRAINS = 8  # at the same time
PUBLIC = {"/health", "/", "/page.js", "/page.css"}  # without a key; the page asks for it
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class AccessControl:
    def __init__(self, app: ASGIApp, key: str | None, host: str, max_requests: int) -> None:
        self.app, self.key, self.loopback = app, key, host in LOOPBACK
        self.max_requests, self.live = max_requests, 0  # but for PUBLIC
        self.draining = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(self, Headers(scope=scope), receive, send)
        counts = scope["path"] not in PUBLIC
        try:
            self._check(scope, Headers(scope=scope))
            if counts and self.live >= self.max_requests:
                raise ApiError(
                    503,
                    f"{self.max_requests} requests are under way; try again in a moment.",
                    code="too_many_requests",
                    headers={"Retry-After": "1"},
                )
        except ApiError as error:
            await error.response()(scope, exchange.receive, exchange.send)
            return
        self.live += counts
        try:
            await self.app(scope, exchange.receive, exchange.send)
        finally:
            self.live -= counts

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"]
        head = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if head + sum(len(name) + len(value) + 4 for name, value in headers.raw) > LARGEST_HEAD:
            raise long_head()
        if self.loopback and _host_name(headers.get("host", "")) not in LOOPBACK:
            raise ApiError(403, "this server answers to localhost alone; see --host.")
        site = headers.get("sec-fetch-site", "none")
        if scope["method"] == "POST" and site not in ("none", "same-origin"):
            raise ApiError(403, "pages of other sites may not ask this server.")
        if self.key is None or path in PUBLIC:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self.key.encode())
        if not same or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "a wrong API key, or none: send Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


class Exchange:
    """One request and its response: adds the common headers, and drains an unread body."""

    def __init__(
        self, access: AccessControl, headers: Headers, receive: Receive, send: Send
    ) -> None:
        self._access, self._receive, self._send = access, receive, send
        self._unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers

    async def receive(self) -> Message:
        message = await self._receive()
        self._unread = self._unread and message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            if self._unread:
                headers["connection"] = "close"
        elif self._unread and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            if self._access.draining < MAX_DRAINS:
                self._access.draining += 1
                try:
                    await self._drain()
                finally:
                    self._access.draining -= 1
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _drain(self) -> None:
        seconds, left = DRAINED
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._unread and left > 0:
                    left -= len((await self.receive()).get("body", b""))


def _host_name(host: str) -> str:
    """Without the port."""
    return host[1:].split("]")[0] if host.startswith("[") else host.rsplit(":", 1)[0].lower()


async def read_body(request: Request) -> dict[str, Any]:
    """A JSON object of bounded size."""
    size = request.headers.get("content-length", "0")
    if not size.isdecimal() or int(size[:12]) > LARGEST_BODY:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > LARGEST_BODY:
                    raise _too_large()
    except TimeoutError:
        raise ApiError(408, "the body did not come in time.") from None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        told = "too deep" if isinstance(error, RecursionError) else error
        raise ApiError(400, f"the body is not JSON: {told}.", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body is not a JSON object.", code="invalid_json")
    return found


def long_head() -> ApiError:
    told = f"the request's line and headers are more than {LARGEST_HEAD // 1024} kB. Send less."
    return ApiError(431, told, code="headers_too_large", headers={"Connection": "close"})


def _too_large() -> ApiError:
    told = f"the body is larger than {LARGEST_BODY // 2**20} MB. Send less at a time."
    return ApiError(413, told, code="request_too_large")
