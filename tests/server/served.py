"""A server on a free port, in a thread of this process, and its LLM."""

import asyncio
import threading
import time
from contextlib import contextmanager

import httpx

from billfish.engine.llm import LLM
from billfish.server.run import Server, ServerSettings, bind

MODEL = "tiny"


class Served:
    def __init__(self, llm, server, url):
        self.llm, self.server, self.url = llm, server, url
        self.admission = server.service.admission

    def http(self, **options):
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def settle(self, seconds=20):
        """Until nothing is left in the engine; says how many pages are in use then."""
        end = time.monotonic() + seconds
        while (self.admission.live or not self.llm.engine.idle) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.05)
        return self.llm.engine.pages.used()


@contextmanager
def served(path, key=None, max_queue=256, drain_seconds=20.0, **options):
    settings = ServerSettings(
        MODEL, port=0, key=key, max_queue=max_queue, drain_seconds=drain_seconds
    )
    bound = bind(settings)
    with LLM(path, **options) as llm:
        server = Server(llm, settings, lambda told: None)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])), daemon=True)
        thread.start()
        one = Served(llm, server, f"http://127.0.0.1:{bound.getsockname()[1]}")
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield one
        finally:
            one.settle()
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
