"""The desk between HTTP and the engine: how many are in, whether more may come, who is owed what.

Everything here runs on the event loop. A job follows its texts in tasks of its own and keeps the
last output of each alone, so a client that reads slowly costs one output and not one for each
token. Closing a job, whether it is done or its client has gone, cancels what is left of it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from billfish.engine.core import Completion, RequestOutput
from billfish.engine.llm import LLM
from billfish.engine.params import SamplingParams
from billfish.server.metrics import Metrics, Watch
from billfish.server.problem import Problem, internal, stopping

log = logging.getLogger("billfish.server")


class Desk:
    def __init__(self, llm: LLM, model: str, max_queue: int) -> None:
        self.llm, self.model = llm, model
        self.metrics = Metrics(model)
        self.live = 0  # texts that are in: waiting or being written
        self.draining = False
        self.most = llm.engine.scheduler.most_sequences + max_queue

    @property
    def healthy(self) -> bool:
        return not self.draining and not self.llm.closed

    def check(self, texts: int) -> None:
        """Whether so many more may come; also asked before a prompt is encoded at all."""
        if self.draining:
            raise stopping()
        if self.llm.closed:
            raise Problem(503, "the engine has stopped; see the log.", code="engine_dead")
        if texts > self.most:
            raise Problem(
                400,
                f"{texts} texts in one request (prompts times n): at most {self.most}. Send "
                "several requests.",
                "n",
            )
        if self.live + texts > self.most:
            self.metrics.counts["admission_rejections_total"] += 1
            raise Problem(
                503,
                f"the queue is full: {self.live} texts are in, and {self.most} may be. Try "
                "again in a moment.",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    def enter(self, prompts: list[list[int]], params: SamplingParams) -> "Job":
        self.check(len(prompts) * params.n)
        return Job(self, prompts, params)

    def stats(self) -> dict[str, Any]:
        pages, running = self.llm.engine.pages, len(self.llm.engine.scheduler.running)
        return {
            "model": self.model,
            "max_model_len": self.llm.max_model_len,
            "running": running,
            "waiting": max(self.live - running, 0),
            "capacity": self.most,
            "kv_used": pages.used() / pages.count,
            "prompt_tokens": self.metrics.counts["prompt_tokens_total"],
            "generation_tokens": self.metrics.counts["generation_tokens_total"],
            "healthy": self.healthy,
        }

    def prometheus(self) -> str:
        told = self.stats()
        return self.metrics.text(
            {
                "num_requests_running": (told["running"], "Texts that are being written."),
                "num_requests_waiting": (told["waiting"], "Texts that wait for it."),
                "kv_cache_usage_perc": (told["kv_used"], "Pages of the cache in use; 1 is all."),
            }
        )


class Job:
    """The texts of one HTTP request, counted as live until it is closed."""

    def __init__(self, desk: Desk, prompts: list[list[int]], params: SamplingParams) -> None:
        self._desk, self.prompts, self.params = desk, prompts, params
        self.outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._texts, self._closed = len(prompts) * params.n, False
        self._watches = [Watch(desk.metrics, len(prompt), params.n) for prompt in prompts]
        desk.live += self._texts
        self._tasks = [asyncio.create_task(self._follow(place)) for place in range(len(prompts))]

    @property
    def finished(self) -> bool:
        return all(output is not None and output.finished for output in self.outputs)

    def completions(self) -> list[tuple[int, int, RequestOutput, Completion]]:
        """(which of all choices, of which prompt, its output, the text so far), once begun."""
        return [
            (place * self.params.n + one.index, place, output, one)
            for place, output in enumerate(self.outputs)
            if output is not None
            for one in output.outputs
        ]

    async def news(self) -> AsyncIterator[None]:
        """Whenever something has come, until all has. Raises Problem."""
        finished = False
        while not finished:
            await self._news.wait()
            self._news.clear()
            self._check()
            finished = self.finished  # of what is seen now; more may come before the next turn
            yield

    async def done(self) -> None:
        async for _ in self.news():
            pass

    def usage(self) -> dict[str, Any]:
        outputs = [output for output in self.outputs if output is not None]
        asked = sum(map(len, self.prompts))
        written = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        return {
            "prompt_tokens": asked,
            "completion_tokens": written,
            "total_tokens": asked + written,
            "prompt_tokens_details": {"cached_tokens": sum(out.cached_tokens for out in outputs)},
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._desk.live -= self._texts
        for task in self._tasks:
            task.cancel()
        for watch in self._watches:
            watch.gone()

    async def _follow(self, place: int) -> None:
        try:
            async for output in self._desk.llm.stream(self.prompts[place], self.params):
                self.outputs[place] = output
                self._watches[place].note(output)
                self._news.set()
        except Exception as error:
            self._error = error
            self._news.set()

    def _check(self) -> None:
        if self._error is not None:
            log.error("a request failed", exc_info=self._error)
            raise internal()
        for output in filter(None, self.outputs):
            for one in output.outputs:
                if one.finish_reason == "error":
                    if (told := one.error or "").startswith("UserError: "):  # its own grammar's
                        raise Problem(400, told.removeprefix("UserError: "))
                    log.error("a request failed in the engine: %s", one.error)
                    raise Problem(500, f"the engine failed: {one.error}", code="engine_error")
                if one.finish_reason == "cancelled":
                    raise Problem(503, "the engine has stopped.", code="shutting_down")
