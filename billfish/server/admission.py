"""Admission control, and the requests that were admitted.

Everything here runs on the event loop. A Generation follows the texts of one HTTP request in tasks
of its own and keeps only the latest output of each prompt, so a client that reads slowly costs one
output and not one for each token. Closing it, because it is done or its client has disconnected,
cancels what is still running.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from billfish.engine.core import Completion, RequestOutput
from billfish.engine.llm import LLM
from billfish.engine.params import SamplingParams
from billfish.server.errors import ApiError, internal_error, queue_full, shutting_down
from billfish.server.metrics import Metrics, RequestTimer

log = logging.getLogger("billfish.server")


class Admission:
    """How many texts are in the engine, and whether more may enter."""

    def __init__(self, llm: LLM, model: str, max_queue: int) -> None:
        self.llm, self.model = llm, model
        self.live = 0  # texts that wait or are being written
        self.draining = False
        self.capacity = llm.engine.scheduler.most_sequences + max_queue
        self.metrics = Metrics(
            model,
            {
                "num_requests_running": lambda: self.running,
                "num_requests_waiting": lambda: self.waiting,
                "kv_cache_usage_perc": lambda: self.kv_usage,
            },
        )

    @property
    def healthy(self) -> bool:
        return not self.draining and not self.llm.closed

    @property
    def running(self) -> int:
        return len(self.llm.engine.scheduler.running)

    @property
    def waiting(self) -> int:
        return max(self.live - self.running, 0)

    @property
    def kv_usage(self) -> float:
        return self.llm.engine.pages.used() / self.llm.engine.pages.count

    def check(self, texts: int) -> None:
        """Raises unless so many more may enter; also asked before a prompt is tokenized."""
        if self.draining:
            raise shutting_down()
        if self.llm.closed:
            raise ApiError(503, "the engine has stopped; see the log.", code="engine_dead")
        if texts > self.capacity:
            raise ApiError(
                400,
                f"{texts} texts in one request (prompts times n): at most {self.capacity}. Send "
                "several requests.",
                "n",
            )
        if self.live + texts > self.capacity:
            self.metrics.counters["admission_rejections_total"].inc()
            raise queue_full(
                f"the queue is full: {self.live} texts are in, and {self.capacity} may be. Try "
                "again in a moment."
            )

    def enter(self, prompts: list[list[int]], params: SamplingParams) -> "Generation":
        self.check(len(prompts) * params.n)
        return Generation(self, prompts, params)

    def stats(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_model_len": self.llm.max_model_len,
            "running": self.running,
            "waiting": self.waiting,
            "capacity": self.capacity,
            "kv_used": self.kv_usage,
            "prompt_tokens": int(self.metrics.value("prompt_tokens_total")),
            "generation_tokens": int(self.metrics.value("generation_tokens_total")),
            "healthy": self.healthy,
        }


class Generation:
    """The texts of one HTTP request, counted as live until it is closed."""

    def __init__(
        self, admission: Admission, prompts: list[list[int]], params: SamplingParams
    ) -> None:
        self._admission, self.prompts, self.params = admission, prompts, params
        self.outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._updated = asyncio.Event()
        self._error: Exception | None = None
        self._texts, self._closed = len(prompts) * params.n, False
        self._timers = [RequestTimer(admission.metrics, len(ids), params.n) for ids in prompts]
        admission.live += self._texts
        self._tasks = [asyncio.create_task(self._follow(place)) for place in range(len(prompts))]

    @property
    def finished(self) -> bool:
        return all(output is not None and output.finished for output in self.outputs)

    def completions(self) -> list[tuple[int, int, RequestOutput, Completion]]:
        """(index of the choice, index of its prompt, the prompt's output, the text so far)."""
        return [
            (place * self.params.n + one.index, place, output, one)
            for place, output in enumerate(self.outputs)
            if output is not None
            for one in output.outputs
        ]

    async def updates(self) -> AsyncIterator[None]:
        """Yields whenever an output has grown, until all are finished. Raises ApiError."""
        finished = False
        while not finished:
            await self._updated.wait()
            self._updated.clear()
            self._check()
            finished = self.finished  # before the yield: outputs may grow while it is suspended
            yield

    async def done(self) -> None:
        async for _ in self.updates():
            pass

    def usage(self) -> dict[str, Any]:
        outputs = [output for output in self.outputs if output is not None]
        prompt = sum(map(len, self.prompts))
        completion = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(out.cached_tokens for out in outputs)},
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._admission.live -= self._texts
        for task in self._tasks:
            task.cancel()
        for timer in self._timers:
            timer.close()

    async def _follow(self, place: int) -> None:
        try:
            async for output in self._admission.llm.stream(self.prompts[place], self.params):
                self.outputs[place] = output
                self._timers[place].update(output)
                self._updated.set()
        except Exception as error:
            self._error = error
            self._updated.set()

    def _check(self) -> None:
        if self._error is not None:
            log.error("a request failed", exc_info=self._error)
            raise internal_error()
        for output in filter(None, self.outputs):
            for one in output.outputs:
                if one.finish_reason == "error":
                    if one.user_error:
                        raise ApiError(400, one.error or "")
                    log.error("a request failed in the engine: %s", one.error)
                    raise ApiError(500, f"the engine failed: {one.error}", code="engine_error")
                if one.finish_reason == "cancelled":
                    raise ApiError(503, "the engine has stopped.", code="shutting_down")
