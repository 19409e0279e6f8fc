"""`billfish serve`: runs uvicorn, and shuts down gracefully.

The first SIGTERM or SIGINT drains: new requests get 503, running ones go on until they end or
`drain_seconds` are over. A second signal ends the process at once.
"""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from billfish.engine.llm import LLM
from billfish.errors import UserError
from billfish.server.app import Service, make_app
from billfish.server.connection import ACCEPTED, BACKLOG, KEEP_ALIVE, RESERVE, Protocol, State
from billfish.server.middleware import LARGEST_HEAD, LOOPBACK

LOGGED, LOG_SECONDS = 5, 60  # messages of a kind that are logged in so many seconds


@dataclass(frozen=True)
class ServerSettings:
    model: str  # the name by which clients ask for it
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    key: str | None = None
    max_queue: int = 256  # texts that may wait beside those being generated
    drain_seconds: float = 60.0
    tool_call_parser: str = "auto"  # or one of tools.FORMATS

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


def bind(settings: ServerSettings) -> socket.socket:
    """Called before the model is loaded, so that a port in use is reported at once."""
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


class RateLimitFilter(logging.Filter):
    """Passes few messages of a kind a minute: clients that cause errors must not fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._since, self._counts = time.monotonic(), Counter[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg)[:40]
        if time.monotonic() - self._since > LOG_SECONDS:
            self._since, self._counts = time.monotonic(), Counter()
        self._counts[kind] += 1
        if self._counts[kind] == LOGGED:
            record.msg = f"{record.msg} (more like it are not logged for {LOG_SECONDS} s)"
        return self._counts[kind] <= LOGGED


class Server(uvicorn.Server):
    def __init__(self, llm: LLM, settings: ServerSettings, say: Callable[[str], None]) -> None:
        self.service = Service(llm, settings.model, settings.max_queue, settings.tool_call_parser)
        self._say, self._seconds = say, settings.drain_seconds
        self._since: float | None = None
        state = State()
        super().__init__(
            uvicorn.Config(
                make_app(
                    self.service, settings.key, settings.host, state.max_connections - RESERVE
                ),
                http=Protocol,
                ws="none",
                lifespan="off",
                backlog=min(ACCEPTED, state.max_connections // 8),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=LARGEST_HEAD,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=5,
            )
        )
        self.server_state = state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or []:
            one.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.admission.llm.templates.close()  # ends a template that is still rendering
        await super().shutdown(sockets)

    def drain(self) -> None:
        self._since, self.service.admission.draining = time.monotonic(), True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._since is not None:
            self.should_exit = self.force_exit = True
            return
        self.drain()
        self._say(f"stopping: {self.service.admission.live} texts are finished first")

    async def on_tick(self, counter: int) -> bool:
        ended = await super().on_tick(counter)
        if self._since is None:
            return ended
        late = time.monotonic() - self._since > self._seconds
        return ended or late or self.service.admission.live == 0


def run_server(
    llm: LLM, settings: ServerSettings, bound: socket.socket, say: Callable[[str], None]
) -> None:
    async def serve() -> None:
        server = Server(llm, settings, say)
        if llm.tokenizer.chat_template:
            llm.templates.start()
        for name in ("asyncio", "uvicorn.error", "billfish.server"):
            logging.getLogger(name).addFilter(RateLimitFilter())
        bound.listen(BACKLOG)  # clients that connect before the server is up wait
        say(address(settings, bound))
        if settings.warning:
            say(f"warning: {settings.warning}")
        try:
            await server.serve([bound])
        finally:
            await asyncio.to_thread(
                llm.close
            )  # while the loop runs: the engine's thread calls back into it
            if (
                left := server.server_state.tasks
            ):  # after a second signal: requests that were just cancelled
                await asyncio.wait(left, timeout=2)

    asyncio.run(serve())


def address(settings: ServerSettings, bound: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{settings.model}: http://{host}:{bound.getsockname()[1]}"
