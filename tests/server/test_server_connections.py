"""Nobody blocks the server without a key: half heads, silence, bodies without end, unread answers,
too many connections, too many requests, and a log that stays small through all of it.
"""

import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

import httpx
import pytest
from served import MODEL, served
from tiny import write_checkpoint

from billfish.server import connection, middleware
from billfish.server.run import LOGGED, RateLimitFilter

HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half: "
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def door(tiny_path):
    with served(tiny_path, key="secret", max_num_seqs=4) as made:
        yield made
        assert made.settle() == 0


def connect(made):
    return socket.create_connection(("127.0.0.1", int(made.url.rsplit(":", 1)[1])), timeout=10)


def post(path, length, key=None):
    given = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{given}Content-Length: {length}\r\n\r\n"
    ).encode()


def answer(raw):
    """All that comes until the other side closes."""
    found = b""
    with suppress(ConnectionResetError):
        while piece := raw.recv(2**16):
            found += piece
    return found


def health(made):
    """Seconds that a fresh connection waits."""
    start = time.monotonic()
    with connect(made) as raw:
        raw.sendall(HEALTH)
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
    return time.monotonic() - start


def until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


@pytest.mark.parametrize("sent", [b"", HALF, HEALTH + HALF, b"POST"])
def test_a_head_has_its_time(sent, door, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    with connect(door) as raw:
        start = time.monotonic()
        raw.sendall(sent)
        if sent.startswith(HEALTH):
            assert raw.recv(1000).startswith(b"HTTP/1.1 200")
        with suppress(BrokenPipeError, ConnectionResetError):  # on a busy machine it is late
            for _ in range(5):  # a byte now and then does not help
                time.sleep(0.05)
                raw.sendall(b"a" if sent else b"")
        assert answer(raw) == b"" and 0.2 < time.monotonic() - start < 3


def test_an_idle_connection_is_closed(door, monkeypatch):
    monkeypatch.setattr(door.server.config, "timeout_keep_alive", 0.2)
    with connect(door) as raw:
        raw.sendall(HEALTH)
        assert answer(raw).startswith(b"HTTP/1.1 200")


def test_the_oldest_idle_connection_gives_way(door, monkeypatch):
    monkeypatch.setattr(door.server.server_state, "max_connections", 40)
    monkeypatch.setattr(door.server.config.app, "max_requests", 24)
    with ExitStack() as held:
        many = [held.enter_context(connect(door)) for _ in range(120)]
        for raw in many:
            with suppress(ConnectionError):  # it had to give way
                raw.sendall(HALF)
        assert health(door) < 1
        until(lambda: len(door.server.server_state.connections) <= 40)
        raw = many[-1]  # those that came last are still there
        raw.sendall(b"a\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
        assert answer(many[0]) == b""
    until(lambda: len(door.server.server_state.idle) == len(door.server.server_state.connections))


def test_health_answers_where_every_connection_is_busy(door, monkeypatch):
    monkeypatch.setattr(door.server.server_state, "max_connections", 8)
    with ExitStack() as held:
        for _ in range(8):  # whole heads, no bodies
            held.enter_context(connect(door)).sendall(post(TEXT, 5, "secret"))
        until(lambda: door.server.config.app.live == 8)
        assert health(door) < 1
        with connect(door) as silent:  # the next one takes the place of one that asks for nothing
            until(lambda: len(door.server.server_state.connections) == 9)
            assert health(door) < 1 and answer(silent) == b""
    until(lambda: door.server.config.app.live == 0)


def test_requests_have_a_bound_and_health_does_not(door, monkeypatch):
    monkeypatch.setattr(door.server.server_state, "max_connections", 40)
    monkeypatch.setattr(door.server.config.app, "max_requests", 24)
    with ExitStack() as held:
        for _ in range(24):  # whole heads, no bodies
            held.enter_context(connect(door)).sendall(post(TEXT, 5, "secret"))
        until(lambda: door.server.config.app.live == 24)
        for _ in range(40):
            held.enter_context(connect(door)).sendall(post(TEXT, 5, "secret"))
        assert health(door) < 1
        with connect(door) as raw:
            raw.sendall(post(TEXT, 5, "secret"))
            refused = answer(raw)
        assert refused.startswith(b"HTTP/1.1 503") and b"too_many_requests" in refused
        assert b"retry-after" in refused.lower()
        assert door.server.config.app.live == 24
    until(lambda: door.server.config.app.live == 0)


def test_who_may_not_ask_holds_nothing(door, monkeypatch):
    """Bodies that do not come, without the key; and pages that are asked for and not read."""
    monkeypatch.setattr(door.server.server_state, "max_connections", 40)
    monkeypatch.setattr(door.server.config.app, "max_requests", 24)
    with ExitStack() as held:
        for place in range(80):
            raw = held.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.connect(("127.0.0.1", int(door.url.rsplit(":", 1)[1])))
            page = b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 600
            raw.sendall(page if place % 4 == 0 else post(TEXT, 5))
        with door.http(headers={"Authorization": "Bearer secret"}) as http:
            start = time.monotonic()
            assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
            assert time.monotonic() - start < 5  # 12000 answers are written beside it
        assert health(door) < 3 and door.server.config.app.live == 0
    until(lambda: not door.server.server_state.connections)


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [(TEXT, "secret", 413), (TEXT, None, 401), ("/nowhere", "secret", 404)],
)
def test_a_body_that_is_refused_is_not_read(path, key, status, door, monkeypatch):
    monkeypatch.setattr(middleware, "DRAINED", (0.5, 2**20))
    with connect(door) as raw:
        raw.sendall(post(path, 2**30, key))
        told = b""
        while not told.endswith(b"}}"):
            told += raw.recv(2000)
        assert told.startswith(b"HTTP/1.1 %d" % status) and b"connection: close" in told.lower()
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 2**27:
                sent += raw.send(b"a" * 2**16)
        assert sent < 2**25  # what was read, and the system's buffers


def test_a_body_has_its_time(door, monkeypatch):
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(middleware, "DRAINED", (0.1, 2**20))
    with connect(door) as raw:
        raw.sendall(post(TEXT, 100, "secret") + b"{")
        told = answer(raw)  # until it is closed
    assert told.startswith(b"HTTP/1.1 408") and b"connection: close" in told.lower()


def test_a_small_body_that_is_refused_keeps_its_answer(door):
    """The client is still sending when the answer comes, and sees it."""
    with door.http() as http:
        for _ in range(5):
            refused = http.post(TEXT, content=b"a" * (middleware.LARGEST_BODY + 1))
            assert refused.status_code == 401


def test_an_answer_that_is_not_read_does_not_stay(door, monkeypatch):
    monkeypatch.setattr(connection, "READ_SECONDS", 0.3)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.connect(("127.0.0.1", int(door.url.rsplit(":", 1)[1])))
        raw.sendall(b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        until(lambda: len(door.server.server_state.connections) == 1)
        until(lambda: len(door.server.server_state.connections) == 0)
    assert door.server.config.app.live == 0


@pytest.mark.parametrize("pieces", [1, 20])
@pytest.mark.parametrize("size", [40_000, 2**20])
def test_heads_have_a_size_in_one_packet_or_many(pieces, size, door):
    head = HEALTH[:-2] + b"X-Long: " + b"a" * size + b"\r\n\r\n"
    with connect(door) as raw:
        with suppress(ConnectionError):  # it is closed before it was read to its end
            for at in range(0, len(head), -(-len(head) // pieces)):
                raw.sendall(head[at : at + -(-len(head) // pieces)])
        told = answer(raw)
    assert b"headers_too_large" in told or (told == b"" and size > 40_000)
    assert told.startswith(b"HTTP/1.1 431") or told == b""


def test_nonsense_in_the_middle_is_no_traceback(door, caplog):
    """A chunk that is none, after a head that was fine; and more of it behind an answer."""
    chunked = (
        f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()
    for sent in (
        chunked + b"zzz\r\n",
        chunked + b"2\r\n{}\r\nzzz\r\n",
        HEALTH + b"\x00\r\n\r\n",
        chunked + b"2\r\n{}\r\n0\r\n\r\n" + b"\x00\r\n\r\n",
    ):
        with connect(door) as raw:
            raw.sendall(sent)
            assert b"HTTP/1.1 400" in answer(raw)
    assert "Traceback" not in caplog.text


def test_a_log_stays_small():
    logger, seen = logging.Logger("test"), []
    logger.addFilter(RateLimitFilter())
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: seen.append(record.getMessage())
    for place in range(10_000):
        logger.error("socket.accept() out of system resource, no %d", place)
    logger.error("another")
    assert len(seen) == LOGGED + 1 and "not logged" in seen[LOGGED - 1] and seen[-1] == "another"


def test_a_command_with_few_files_and_a_template_without_end(tmp_path):
    """200 connections where the process may have 160 files, each with half a head, while a chat is
    rendered that never ends: health answers, the log stays small, SIGTERM ends it all."""
    path = write_checkpoint(tmp_path / "hostile")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "chat_template.jinja").unlink(missing_ok=True)
    (path / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": "{{ 10 ** (10 ** 9) }}"})
    )
    command = [
        sys.executable,
        "-m",
        "billfish.cli.app",
        "serve",
        str(path),
        "--port",
        "0",
        "--served-model-name",
        MODEL,
    ]
    with ExitStack() as held:
        process = held.enter_context(
            subprocess.Popen(
                command,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160)),
            )
        )
        held.callback(process.kill)
        lines, log = iter(process.stderr.readline, ""), []
        url = next(line for line in lines if "http://" in line).split()[-1]
        threading.Thread(target=lambda: log.extend(lines), daemon=True).start()
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        found = []
        client = threading.Thread(
            target=lambda: found.append(
                httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60)
            )
        )
        client.start()
        for _ in range(200):
            raw = held.enter_context(socket.socket())
            raw.settimeout(5)
            raw.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
            with suppress(ConnectionError):
                raw.sendall(HALF)
        for _ in range(3):
            start = time.monotonic()
            assert httpx.get(f"{url}/health", timeout=20).status_code == 200
            assert time.monotonic() - start < 3
        process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert process.wait(30) == 0 and time.monotonic() - start < 8
        client.join(10)
        assert [answer.status_code for answer in found] == [503]
    assert len("".join(log)) < 20_000 and "Traceback" not in "".join(log)
