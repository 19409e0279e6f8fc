"""What a server must bear: clients that leave, too many of them, too much of anything, and the end.

Disconnects free their pages, a full queue says 503, keys and limits hold, SIGTERM drains.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import openai
import pytest
from served import MODEL, served
from thorough import some

from billfish.engine.params import SamplingParams
from billfish.errors import UserError
from billfish.server.middleware import LARGEST_BODY, LARGEST_HEAD
from billfish.server.run import ServerSettings, bind

LONG = {"model": MODEL, "prompt": "abc", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
TEXT = "/v1/completions"


@pytest.fixture
def slow(server, monkeypatch):
    """Steps that take 20 ms, so that there is a while in which a text is being written."""
    inner = server.llm.engine.step

    def step():
        time.sleep(0.02)
        return inner()

    monkeypatch.setattr(server.llm.engine, "step", step)
    return server


def wait_for(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(stream, slow):
    start = time.monotonic()
    body = json.dumps({**LONG, "stream": stream, "n": 3}).encode()
    with socket.create_connection(("127.0.0.1", int(slow.url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (TEXT.encode(), len(body), body)
        )
        wait_for(lambda: slow.llm.engine.pages.used() > 0)
        assert slow.admission.live == 3
        if stream:
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
    assert slow.settle() == 0
    assert slow.admission.live == 0 and time.monotonic() - start < 2  # 120 steps would be 2.4 s
    assert slow.admission.metrics.value("request_success_total", finished_reason="abort") >= 3


def test_a_client_that_reads_nothing_holds_nobody_up(server):
    body = json.dumps({**LONG, "stream": True, "n": 30, "logprobs": 20}).encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        raw.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (TEXT.encode(), len(body), body)
        )
        wait_for(lambda: not server.llm.engine.idle)
        with server.http() as http:
            assert http.post(TEXT, json={**LONG, "max_tokens": 5}).status_code == 200
        wait_for(lambda: server.llm.engine.idle, 30)  # written to its end, unread
        assert server.llm.engine.pages.used() == 0
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += raw.recv(2**16)
    assert answer.count(b'"finish_reason":"length"') == 30 and b"data: [DONE]" in answer
    assert server.settle() == 0


def test_a_full_queue_says_so(tiny_path):
    with served(tiny_path, max_num_seqs=2, max_queue=1) as made, made.http() as http:
        found = []
        three = [
            threading.Thread(
                target=lambda: found.append(httpx.post(made.url + TEXT, json=LONG, timeout=60))
            )
            for _ in range(3)
        ]
        with slowed(made.llm.engine):
            for thread in three:
                thread.start()
            wait_for(lambda: made.admission.live == 3)
            refused = http.post(TEXT, json=LONG)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "queue_full"
            assert http.get("/health").status_code == 200
            wait_for(lambda: http.get("/stats").json()["running"] == 2)
            told = http.get("/stats").json()
            assert told["waiting"] == 1 and told["kv_used"] > 0
            assert 'admission_rejections_total{model_name="tiny"} 1' in http.get("/metrics").text
            assert http.post(TEXT, json={**LONG, "n": 4}).status_code == 400  # never fits
        for thread in three:
            thread.join()
        assert {answer.status_code for answer in found} == {200}
        assert http.post(TEXT, json=LONG).status_code == 200


@contextmanager
def slowed(engine):
    """Steps that take 20 ms, while something must not end."""
    inner = engine.step

    def step():
        time.sleep(0.02)
        return inner()

    engine.step = step
    yield
    engine.step = inner


def test_a_key(tiny_path):
    with served(tiny_path, key="secret") as made, made.http() as http:
        for given in (b"", b"Bearer wrong", b"secret", b"Basic secret", b"Bearer s\xe9"):
            sent = {"Authorization": given}
            for path in (TEXT, "/tokenize"):
                answer = http.post(path, json=LONG, headers=sent)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            for path in ("/metrics", "/stats", "/v1/models", "/version", "/nowhere"):
                assert http.get(path, headers=sent).status_code == 401
        assert http.get("/health").status_code == 200 and http.get("/").status_code == 200
        client = openai.OpenAI(base_url=f"{made.url}/v1", api_key="secret", max_retries=0)
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).choices


def test_bodies_and_headers_have_limits(server):
    with server.http() as http:
        large = b'{"prompt": "' + b"a" * LARGEST_BODY + b'"}'
        answer = http.post(TEXT, content=large)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        pieces = (large[at : at + 2**16] for at in range(0, len(large), 2**16))
        assert http.post(TEXT, content=pieces).status_code == 413  # its length was not told
        assert http.get("/health").status_code == 200
    for head in (b"X-Long: " + b"a" * 2**20, b"X: a\r\n" * LARGEST_HEAD, b"no header at all"):
        answer = raw_request(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + head)
        assert (answer.startswith(b"HTTP/1.1 4") and b'"error"' in answer) or answer == b""
    assert raw_request(server, b"nonsense").startswith(b"HTTP/1.1 400")
    with server.http() as http:
        assert http.get("/health").status_code == 200


def raw_request(server, head):
    answer = b""
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
        try:
            raw.sendall(head + b"\r\n\r\n")
            while piece := raw.recv(4096):
                answer += piece
        except ConnectionError:  # it was closed while we were still sending
            pass
    return answer


def test_other_sites_and_names_are_refused(server):
    with server.http() as http:
        for site in ("cross-site", "same-site"):
            answer = http.post(TEXT, json=LONG, headers={"Sec-Fetch-Site": site})
            assert answer.status_code == 403 and answer.json()["error"]["type"]
        assert http.get("/stats", headers={"Host": "evil.example"}).status_code == 403
        for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000"):
            assert http.get("/stats", headers={"Host": host}).status_code == 200
        answer = http.options(
            TEXT, headers={"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        )
        assert "access-control-allow-origin" not in answer.headers


def test_the_page_is_served_whole_and_strictly(server):
    with server.http() as http:
        kinds = {"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css"}
        for path, kind in kinds.items():
            answer = http.get(path)
            assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "://" not in answer.text.replace("http://www.w3.org", "")  # works offline
            assert "innerHTML" not in answer.text and " style=" not in answer.text
        assert "<script src=" in http.get("/").text and "onclick" not in http.get("/").text


def test_draining_finishes_what_runs(tiny_path):
    with served(tiny_path, max_num_seqs=2) as made:
        (wanted,) = made.llm.generate(
            "abc", SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        )
        found = []
        running = threading.Thread(
            target=lambda: found.append(httpx.post(made.url + TEXT, json=LONG, timeout=60))
        )
        with slowed(made.llm.engine):
            running.start()
            wait_for(lambda: made.admission.live == 1)
            with made.http() as http:
                made.server.drain()
                refused = http.post(TEXT, json=LONG)
                assert refused.status_code == 503 and refused.headers["retry-after"]
                assert refused.json()["error"]["code"] == "shutting_down"
                assert http.get("/health").status_code == 503
        running.join()
        assert found[0].json()["choices"][0]["text"] == wanted.outputs[0].text
        wait_for(lambda: not made.server.servers[0].is_serving())


@pytest.mark.parametrize("signals", some([1, 2], 0))
def test_the_command_drains_on_sigterm(signals, tiny_path, tmp_path):
    command = [
        sys.executable,
        "-m",
        "billfish.cli.app",
        "serve",
        str(tiny_path),
        "--port",
        "0",
        "--max-num-seqs",
        "2",
        "--served-model-name",
        MODEL,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BILLFISH_API_KEY": "k"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        lines = iter(process.stderr.readline, "")
        url = next(line for line in lines if "http://" in line).split()[-1]
        headers = {"Authorization": "Bearer k"}
        with httpx.Client(base_url=url, timeout=60, headers=headers) as http:
            many = {**LONG, "prompt": ["abc"] * 20, "stream": True}
            with http.stream("POST", TEXT, json=many) as answer:
                events = answer.iter_lines()
                next(events)
                for _ in range(signals):
                    process.send_signal(signal.SIGTERM)
                    time.sleep(0.3)
                if signals == 1:
                    assert httpx.get(url + "/health").status_code == 503
                    ends = sum('"finish_reason":"length"' in event for event in events)
                    assert ends == 20
            code = process.wait(20)
        assert code == 0
        assert "Traceback" not in process.stderr.read()


def test_an_engine_that_is_gone_is_not_healthy(tiny_path):
    with served(tiny_path) as made, made.http() as http:
        made.llm.close()
        assert http.get("/health").status_code == 503
        answer = http.post(TEXT, json=LONG)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"


def test_settings_that_are_wrong():
    for options in ({"port": 70000}, {"max_queue": -1}, {"key": " "}, {"model": ""}):
        with pytest.raises(UserError):
            ServerSettings(**{"model": MODEL, **options})
    assert "without an API key" in ServerSettings(MODEL, host="0.0.0.0").warning
    assert ServerSettings(MODEL, host="0.0.0.0", key="k").warning is None
    assert ServerSettings(MODEL).warning is None
    with bind(ServerSettings(MODEL, port=0)) as taken:
        taken.listen()
        with pytest.raises(UserError, match="in use"):
            bind(ServerSettings(MODEL, port=taken.getsockname()[1]))
