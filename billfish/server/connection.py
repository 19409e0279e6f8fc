"""One connection: how long it may take, how large a head may be, and who gives way when all are in.

uvicorn waits for ever for the rest of a head, and takes connections until the process has no files
left. Here a head, an idle connection and a reader that takes nothing have their times, and there is
a bound on connections, far below the file limit. When it is reached the one that has been idle for
longest gives way to the new one: so a fresh `/health` is answered however many hold half a head.
Requests under way are not cut off for it: they have a lower bound of their own (guard.py).
"""

import asyncio
import resource
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from billfish.server.guard import LARGEST_HEAD, long_head
from billfish.server.problem import Problem

HEAD_SECONDS = 10.0  # from the first byte of a request's head, or the connection, to its last
READ_SECONDS = 60.0  # a client that takes nothing of its answer for so long has gone
KEEP_ALIVE = 30  # seconds an idle connection stays
MOST = 4096  # connections
RESERVE = 16  # of them, that requests under way leave over
ACCEPTED = 64  # at once, before the oldest have given way
BACKLOG = 2048  # that the system keeps


def most_connections() -> int:
    """Half of the process's files: the other half is the model's, and the engine's."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if files == resource.RLIM_INFINITY else max(2 * RESERVE, min(MOST, files // 2))


class State(ServerState):
    """What all connections of a server share."""

    def __init__(self) -> None:
        super().__init__()
        self.most = most_connections()
        # Without a request, or not reading the answer; the first has been so for longest.
        self.idle: dict[Protocol, None] = {}


class Timer:
    """Calls once, unless it is stopped before."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._seconds, self._call = seconds, call
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """One that runs goes on."""
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
        self._head, self._read = Timer(HEAD_SECONDS, self.leave), Timer(READ_SECONDS, self.leave)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        state = self.server_state
        state.idle[self] = None
        self._head.start()
        if len(state.connections) > state.most:
            next(iter(state.idle)).leave()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def _note(self) -> None:
        """Whether a request is under way, and what is waited for if none is."""
        closing = self.transport.is_closing()
        if self.conn.their_state is not h11.IDLE and not closing:
            self._head.stop()
            self.server_state.idle.pop(self, None)
            return
        self.server_state.idle.setdefault(self)
        if closing:
            self._read.start()  # until its last bytes are out
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
        self._note()

    def timeout_keep_alive_handler(self) -> None:
        self.leave()

    def leave(self) -> None:
        """At once: an answer that nobody reads does not keep it here."""
        self.server_state.connections.discard(self)
        self.server_state.idle.pop(self, None)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """In the shape of all errors; nothing if an answer is on its way."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            long = len(self.conn.trailing_data[0]) > LARGEST_HEAD
            problem = long_head() if long else Problem(400, "this is not HTTP.", code="bad_request")
            response = problem.response()
            response.headers["connection"] = "close"
            for event in (
                h11.Response(status_code=problem.status, headers=response.raw_headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
