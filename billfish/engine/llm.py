"""LLM: a checkpoint directory that answers many prompts at once.

    llm = billfish.LLM("./smol-w4")
    llm.generate(["What is a billfish?"], billfish.SamplingParams(temperature=0))

One thread owns the engine and steps it while there is work; callers, threads (`generate`) or
coroutines (`stream`), put requests into its queue and are notified of outputs.
"""

import asyncio
import itertools
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from billfish.engine.build import Loaded, Settings, Source, apart, build
from billfish.engine.core import Completion, Engine, RequestOutput
from billfish.engine.sampling import SamplingParams
from billfish.engine.structured import Matchers, StructuredOutputsParams
from billfish.errors import UserError
from billfish.models.compute import device_of
from billfish.models.template import Renderer

Prompt = str | Sequence[int]
Message = dict[str, Any]  # of a chat, or a tool
Notify = Callable[[RequestOutput], None]


class LLM:
    """Close it, or use it in a `with`, to end its thread; a process that ends does so, too."""

    def __init__(
        self,
        path: Source,  # Loaded: `of`
        *,
        kv: str = "kv16",
        dtype: str | torch.dtype = "auto",  # to compute in; auto: as load chooses
        device: str = "auto",
        max_model_len: int | None = None,  # tokens of prompt and completion; None: the model's
        max_num_seqs: int = 32,  # sequences that run at the same time
        max_batched_tokens: int | None = None,  # tokens of a step
        gpu_memory: float = 0.9,  # share of the GPU's memory for weights and cache together
        pages: int | None = None,  # of the cache; None: as memory allows
        prefix_caching: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        device = str(device_of(device))
        settings = Settings(
            kv=kv,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            gpu_memory=gpu_memory,
            pages=pages,
            prefix_caching=prefix_caching,
            batch_invariant=batch_invariant,
        )
        self.engine = apart(device, partial(build, path, settings))
        self.tokenizer = self.engine.tokenizer
        self.vocabulary = self.engine.decoder.shape.vocabulary
        self.max_model_len = self.engine.most_tokens
        self.templates = Renderer()
        self.matchers = Matchers(self.tokenizer, self.vocabulary, self.engine.eos)
        self._names = itertools.count()
        self._worker = _Worker(self.engine)

    @classmethod
    def of(cls, model: Any, tokenizer: Any, given: bool = False, **settings: Any) -> "LLM":
        """From a model in memory, on its device and in its dtype; `close` does not free it. With
        `given` the engine owns it and may rearrange its weights (on a CPU), as LLM does with its
        own. Settings are LLM's, without those about loading."""
        if told := sorted(settings.keys() & {"dtype", "device", "batch_invariant"}):
            raise UserError(
                f"LLM.of with {', '.join(told)}: the model is loaded, which settles it. Say it to "
                "billfish.load, or give LLM the checkpoint's path."
            )
        return cls(Loaded(model, tokenizer, given), **settings)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """In the order of the prompts; a prompt is a string or token ids."""
        many: Sequence[Any] = [prompts] if _is_one(prompts) else list(prompts)
        wanted = (
            [params or SamplingParams()] * len(many)
            if not isinstance(params, Sequence)
            else (list(params))
        )
        if len(wanted) != len(many):
            raise UserError(f"{len(many)} prompts and {len(wanted)} params: give one for each.")
        wanted = [self._compiled(one) for one in wanted]
        requests = [self._request(prompt, one) for prompt, one in zip(many, wanted, strict=True)]
        self._wait_for(requests, wanted)
        return requests

    def score(self, prompts: Sequence[Prompt]) -> list[list[float]]:
        """Log-probability of every token but the first, given those before it."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        requests = [self._request(prompt, params) for prompt in prompts]
        self._wait_for(requests, [params] * len(requests))
        for request in requests:
            if request.outputs[0].error:
                raise RuntimeError(request.outputs[0].error)
        return [
            [one.logprob or 0.0 for one in request.prompt_logprobs or []] for request in requests
        ]

    def _wait_for(
        self, requests: Sequence[RequestOutput], params: Sequence[SamplingParams]
    ) -> None:
        ended: queue.SimpleQueue[str] = queue.SimpleQueue()

        def notify(output: RequestOutput) -> None:
            # Not for every token: waking this thread takes Python's lock from the engine's, 64
            # times a step.
            if output.finished:
                ended.put(output.name)

        try:
            for request, one in zip(requests, params, strict=True):
                self._worker.add(request, one, notify)
            unfinished = {request.name for request in requests}
            while unfinished:
                unfinished.discard(ended.get())
        except BaseException:
            for request in requests:
                self._worker.cancel(request.name)
            raise

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Message] | None = None,
    ) -> RequestOutput:
        return self.generate(self.templated(messages, tools), params)[0]

    def templated(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> list[int]:
        """Token ids of messages, by the model's chat template."""
        ids: list[int] = self.tokenizer(
            self.templates.render(self.tokenizer, messages, tools), add_special_tokens=False
        ).input_ids
        return ids

    def check(self, params: SamplingParams) -> None:
        """UserError if this model does not support the params."""
        params.check_for(self.vocabulary, self.engine.eos)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yields the output so far whenever it has grown. Leaving the loop cancels the request."""
        params = self._compiled(params or SamplingParams())
        request = self._request(prompt, params)
        loop, news = asyncio.get_running_loop(), asyncio.Queue[RequestOutput]()

        def notify(output: RequestOutput) -> None:
            loop.call_soon_threadsafe(news.put_nowait, _snapshot(output))

        self._worker.add(request, params, notify)
        try:
            while True:
                output = await news.get()
                yield output
                if output.finished:
                    return
        finally:
            if not request.finished:
                self._worker.cancel(request.name)

    def iterate(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """`stream` for a thread that has no event loop: the output so far, whenever it has grown.
        Leaving the loop cancels the request."""
        params = self._compiled(params or SamplingParams())
        request = self._request(prompt, params)
        news: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._worker.add(request, params, lambda output: news.put(_snapshot(output)))
        try:
            while True:
                output = news.get()
                yield output
                if output.finished:
                    return
        finally:
            if not request.finished:
                self._worker.cancel(request.name)

    def close(self) -> None:
        self.templates.close()
        self.matchers.close()
        self._worker.close()

    @property
    def closed(self) -> bool:
        """Also when the engine's thread has died: no request is answered any more."""
        return self._worker.closed

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compiled(self, params: SamplingParams) -> SamplingParams:
        wanted = params.structured_outputs
        if not isinstance(wanted, StructuredOutputsParams):
            return params
        return replace(params, structured_outputs=self.matchers.compile(wanted))

    def _request(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UserError("a prompt is empty; give at least one token.")
        wrong = [
            i
            for i in ids
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.vocabulary
        ]
        if wrong:
            raise UserError(
                f"token id {wrong[0]!r} in a prompt: ids are 0 to {self.vocabulary - 1}."
            )
        self.check(params)
        if len(ids) + min(params.max_tokens, 1) > self.max_model_len:
            raise UserError(
                f"a prompt of {len(ids)} tokens leaves no room: prompt and text together have "
                f"{self.max_model_len} (max_model_len). Shorten it."
            )
        most = min(len(ids) + params.max_tokens, self.max_model_len)
        pages = self.engine.pages
        if math.ceil(most / pages.tokens) > pages.count:
            raise UserError(
                f"a prompt of {len(ids)} tokens and max_tokens {params.max_tokens} need "
                f"{math.ceil(most / pages.tokens)} pages of {pages.tokens} tokens; the cache has "
                f"{pages.count}. Lower max_tokens, or give the cache more pages."
            )
        outputs = [Completion(index) for index in range(params.n)]
        return RequestOutput(f"request-{next(self._names)}", text, ids, outputs)


class _Worker:
    """The thread that owns the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: dict[str, tuple[RequestOutput, Notify]] = {}
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._work, name="billfish-engine", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def add(self, request: RequestOutput, params: SamplingParams, notify: Notify) -> None:
        def order() -> None:
            self._waiting[request.name] = (request, notify)
            try:
                self.engine.add(request, params)
            except Exception as error:  # a bug, which ends this request alone
                self.engine.cancel(request.name)
                for one in request.outputs:
                    one.fail(error)
                self._tell([request])

        with self._lock:  # no request enters the queue of a thread that has ended
            if self._closed:
                raise UserError("this LLM is closed; make another.")
            self._orders.put(order)

    def cancel(self, name: str) -> None:
        def order() -> None:
            self._waiting.pop(name, None)
            self.engine.cancel(name)

        self._orders.put(order)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._orders.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while True:
                try:
                    order = self._orders.get(block=self.engine.idle)
                except queue.Empty:
                    self._tell(self.engine.step())
                    continue
                if order is None:
                    return
                order()
        finally:  # also if the engine fails: every waiting caller is notified
            with self._lock:
                self._closed = True
            while not self._orders.empty():
                if (order := self._orders.get()) is not None:
                    order()
            for request, _ in list(self._waiting.values()):
                self.engine.cancel(request.name)
                self._tell([request])

    def _tell(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            _, notify = self._waiting.get(output.name, (None, None))
            if notify is not None:
                if output.finished:
                    del self._waiting[output.name]
                try:
                    notify(output)
                except Exception:  # the listener is gone, e.g. its event loop was closed
                    self._waiting.pop(output.name, None)
                    self.engine.cancel(output.name)


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy: the engine's thread goes on writing into the original."""
    outputs = [
        replace(one, token_ids=list(one.token_ids), logprobs=list(one.logprobs))
        for one in output.outputs
    ]
    return replace(output, outputs=outputs)


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (
        len(prompts) > 0 and all(isinstance(each, int) for each in prompts)
    )
