"""Before any route: who may ask, from where, and how much.

A browser is not a client to be trusted: pages of other sites may not make it ask (no CORS, no
cross-site POST), and a server on a loopback address answers to loopback names alone, so that no
foreign name can be pointed at it (DNS rebinding).
"""

import asyncio
import hmac
import json
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from billfish.server.problem import Problem

LARGEST_BODY = 8 * 2**20
SLOWEST_BODY = 60.0  # seconds
OPEN = {"/health", "/", "/page.js", "/page.css"}  # no secrets there; the page asks for the key
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    def __init__(self, app: ASGIApp, key: str | None, host: str) -> None:
        self.app, self.key, self.loopback = app, key, host in LOOPBACK

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(scope["method"], scope["path"], Headers(scope=scope))
        except Problem as problem:
            await problem.response()(scope, receive, sending)
        else:
            await self.app(scope, receive, sending)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        if self.loopback and _name(headers.get("host", "")) not in LOOPBACK:
            raise Problem(403, "this server answers to localhost alone; see --host.")
        site = headers.get("sec-fetch-site", "none")
        if method == "POST" and site not in ("none", "same-origin"):
            raise Problem(403, "pages of other sites may not ask this server.")
        if self.key is None or path in OPEN:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self.key.encode())
        if not same or scheme.lower() != "bearer":
            raise Problem(
                401, "a wrong API key, or none: send Authorization: Bearer KEY.",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip


def _name(host: str) -> str:
    """Without its port."""
    return host[1:].split("]")[0] if host.startswith("[") else host.rsplit(":", 1)[0].lower()


async def read(request: Request) -> dict[str, Any]:
    """The body, a JSON object of a bounded size."""
    size = request.headers.get("content-length", "0")
    if not size.isdecimal() or int(size[:12]) > LARGEST_BODY:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(SLOWEST_BODY):
            async for piece in request.stream():
                body += piece
                if len(body) > LARGEST_BODY:
                    raise _too_large()
    except TimeoutError:
        raise Problem(408, "the body did not come in time.") from None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        told = "too deep" if isinstance(error, RecursionError) else error
        raise Problem(400, f"the body is not JSON: {told}.", code="invalid_json") from None
    if not isinstance(found, dict):
        raise Problem(400, "the body is not a JSON object.", code="invalid_json")
    return found


def _too_large() -> Problem:
    told = f"the body is larger than {LARGEST_BODY // 2**20} MB. Send less at a time."
    return Problem(413, told, code="request_too_large")
