"""Limits on connections that uvicorn lacks: timeouts, the size of a head, and their number.

uvicorn waits without limit for the rest of a request's head, and accepts connections until the
process runs out of file descriptors. Here incomplete heads, idle connections and clients that do
not read have timeouts, and the number of connections stays far below the descriptor limit. When it
is reached, the connection that has been idle longest is closed in favour of the new one, so that
`/health` responds however many clients hold half a head. Running requests are not closed for it;
middleware.py has a lower limit on their number.
"""

import asyncio
import resource
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from billfish.server.errors import ApiError
from billfish.server.middleware import LARGEST_HEAD, long_head

HEAD_SECONDS = 10.0  # from the connection, or a head's first byte, to the head's last byte
READ_SECONDS = 60.0  # in which a client must read some of its response
KEEP_ALIVE = 30  # seconds an idle connection stays
MAX_CONNECTIONS = 4096
RESERVE = 16  # connections that running requests leave free
ACCEPTED = 64  # connections at once, before the ones idle longest are closed
BACKLOG = 2048  # connections that the kernel queues


def max_connections() -> int:
    """At most half of the file descriptors: the model and the engine need some, too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(2 * RESERVE, min(MAX_CONNECTIONS, files // 2))


class State(ServerState):
    """Shared by all connections of a server."""

    def __init__(self) -> None:
        super().__init__()
        self.max_connections = max_connections()
        # Without a request, or with a client that does not read; longest idle first.
        self.idle: dict[Protocol, None] = {}


class Timer:
    """Calls `call` once, `seconds` after start, unless stopped before."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._seconds, self._call = seconds, call
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Does not restart a running timer."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Protocol(H11Protocol):
    server_state: State

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head, self._read = Timer(HEAD_SECONDS, self.drop), Timer(READ_SECONDS, self.drop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        state = self.server_state
        state.idle[self] = None
        self._head.start()
        if len(state.connections) > state.max_connections:
            oldest = next(iter(state.idle))
            if oldest is not self:  # all others are busy: it may ask for /health
                oldest.drop()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_idle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_idle()

    def _update_idle(self) -> None:
        """Without a running request the connection is idle, and a timer runs."""
        closing = self.transport.is_closing()
        if self.conn.their_state is not h11.IDLE and not closing:
            self._head.stop()
            self.server_state.idle.pop(self, None)
            return
        self.server_state.idle.setdefault(self)
        if closing:
            self._read.start()  # until the last bytes are sent
        elif self.timeout_keep_alive_task is None:
            self._head.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.stop()
        self._read.stop()
        self.server_state.idle.pop(self, None)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.server_state.idle.setdefault(self)
        self._read.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read.stop()
        self._update_idle()

    def timeout_keep_alive_handler(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Closes at once, without waiting for a client to read the rest."""
        self.server_state.connections.discard(self)
        self.server_state.idle.pop(self, None)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """An error in OpenAI's shape; nothing if a response has begun."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            long = len(self.conn.trailing_data[0]) > LARGEST_HEAD
            error = ApiError(400, "this is not HTTP.", code="bad_request")
            error = long_head() if long else error
            response = error.response()
            response.headers["connection"] = "close"
            for event in (
                h11.Response(status_code=error.status, headers=response.raw_headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
