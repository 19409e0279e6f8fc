"""`serve`: bind, load, answer, and on SIGTERM finish what runs before leaving.

The first signal drains: new requests get 503, those that run go on, until none is left or time is
up. A second one ends at once.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from billfish.engine.llm import LLM
from billfish.errors import UserError
from billfish.server.app import Service, make
from billfish.server.guard import LOOPBACK
from billfish.server.problem import Problem

LARGEST_HEAD = 32 * 1024  # bytes of a request's line and headers
KEEP_ALIVE = 30  # seconds an idle connection stays


@dataclass(frozen=True)
class Settings:
    model: str  # its name for clients
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    key: str | None = None
    max_queue: int = 256  # texts that wait beside those that are written
    drain_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.model:
            raise UserError("--served-model-name is empty; leave it out, or give one.")
        if not 0 <= self.port < 2**16:
            raise UserError(f"--port {self.port}: 0 to 65535.")
        if self.max_queue < 0:
            raise UserError(f"--max-queue {self.max_queue}: at least 0.")
        if self.key is not None and not self.key.strip():
            raise UserError("the API key is empty; leave --api-key and BILLFISH_API_KEY out.")

    @property
    def warning(self) -> str | None:
        if self.host in LOOPBACK or self.key is not None:
            return None
        return (
            f"bound to {self.host} without an API key: whoever reaches this port may use it. "
            "--api-key, or BILLFISH_API_KEY, asks for one."
        )


def bind(settings: Settings) -> socket.socket:
    """Before a model is loaded, since that takes longer than to say that a port is taken."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, proto, _, address = found[0]
        made = socket.socket(family, kind, proto)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        raise UserError(
            f"{settings.host} port {settings.port}: {error.strerror}. Take another --host or "
            "--port."
        ) from None
    return made


class Protocol(H11Protocol):
    """Requests that are no HTTP, or whose headers are too long, get an error in the same shape."""

    def send_400_response(self, msg: str) -> None:
        told = f"not HTTP, or more than {LARGEST_HEAD} bytes of headers"
        response = Problem(400, told, code="bad_request").response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    def __init__(self, llm: LLM, settings: Settings, say: Callable[[str], None]) -> None:
        self.service = Service(llm, settings.model, settings.max_queue)
        self._say, self._seconds = say, settings.drain_seconds
        self._since: float | None = None
        super().__init__(
            uvicorn.Config(
                make(self.service, settings.key, settings.host),
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=LARGEST_HEAD,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=5,
            )
        )

    def drain(self) -> None:
        self._since, self.service.desk.draining = time.monotonic(), True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._since is not None:
            self.should_exit = self.force_exit = True
            return
        self.drain()
        self._say(f"stopping: {self.service.desk.live} texts are finished first")

    async def on_tick(self, counter: int) -> bool:
        ended = await super().on_tick(counter)
        if self._since is None:
            return ended
        late = time.monotonic() - self._since > self._seconds
        return ended or late or self.service.desk.live == 0


def run(llm: LLM, settings: Settings, bound: socket.socket, say: Callable[[str], None]) -> None:
    async def serve() -> None:
        server = Server(llm, settings, say)
        say(address(settings, bound))
        if settings.warning:
            say(f"warning: {settings.warning}")
        try:
            await server.serve([bound])
        finally:
            await asyncio.to_thread(llm.close)  # its thread knows this loop
            if left := server.server_state.tasks:  # of a second signal: they were told just now
                await asyncio.wait(left, timeout=2)

    asyncio.run(serve())


def address(settings: Settings, bound: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{settings.model}: http://{host}:{bound.getsockname()[1]}"
