"""The routes: read a body, check it, let the engine work, answer. OpenAI's, and a few of vLLM's."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from billfish.engine.llm import LLM
from billfish.engine.structured import Matcher, StructuredOutputsParams
from billfish.errors import UserError
from billfish.server import asking, tools
from billfish.server.answers import Answer, Chat, Text
from billfish.server.desk import Desk, Job
from billfish.server.guard import Guard, read
from billfish.server.problem import Problem, internal, wrong
from billfish.server.tools import Toolbox
from billfish.server.words import Words
from billfish.version import __version__

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MOST_GRAMMARS = 32  # that wait to be compiled
METRICS = "text/plain; version=0.0.4; charset=utf-8"


class Service:
    """One model behind the routes."""

    def __init__(self, llm: LLM, model: str, max_queue: int, parser: str = "auto") -> None:
        self.toolbox = Toolbox(llm.tokenizer, parser)
        self._compiling, self._waiting = asyncio.Lock(), 0
        self.desk, self.words, self.model = Desk(llm, model, max_queue), Words(llm), model
        self.created = int(time.time())
        # Two servers of the same fingerprint and seed write the same.
        told = f"{__version__} {model} {type(llm.engine.runner).__name__} {llm.max_model_len}"
        self.fingerprint = "fp_" + hashlib.sha256(told.encode()).hexdigest()[:12]

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        messages = asking.messages(body)
        if asking.flag(body, "echo"):
            raise wrong("echo", True, "not for chats; it is what /v1/completions has")
        self.desk.check(asking.count(body))
        wanted, called, more = asking.structured(body), tools.asked(body), {}
        if called is not None:
            self.toolbox.check(called)
            wanted = self.toolbox.grammar(called, wanted)
            more = {"skip_special_tokens": False} if self.toolbox.shows_special else {}
        ids = await self.words.chat(*self.toolbox.prompt(messages, called))
        asked = asking.max_tokens(body, None)
        self.words.check_length(ids, asked)
        tops = asking.logprobs(body, chat=True)
        most = asked or self.words.most - len(ids)
        matcher = await self._matcher(body, wanted)
        params = asking.params(body, most, tops, self.desk.llm, matcher=matcher, **more)
        usage = asking.wants_usage(body)
        stream = asking.flag(body, "stream")
        job = self.desk.enter([ids], params)
        answer = Answer(
            job,
            Chat(),
            self.words,
            self._head(Chat.prefix),
            tops is not None,
            tools=self.toolbox.format if called else None,
        )
        return await self._send(request, answer, stream, usage)

    async def complete(self, request: Request) -> Response:
        body = await self._body(request)
        given = asking.prompts(body)
        echo, special = asking.flag(body, "echo"), asking.flag(body, "add_special_tokens", True)
        self.desk.check(len(given) * asking.count(body))
        prompts = [await self.words.prompt(one, special) for one in given]
        asked = asking.max_tokens(body, 16)
        for ids in prompts:
            self.words.check_length(ids, asked)
        tops = asking.logprobs(body, chat=False)
        assert asked is not None
        matcher = await self._matcher(body, asking.structured(body))
        params = asking.params(body, asked, tops, self.desk.llm, echo, matcher)
        usage = asking.wants_usage(body)
        stream = asking.flag(body, "stream")
        texts = [one if isinstance(one, str) else self.words.decode(one) for one in given]
        job = self.desk.enter(prompts, params)
        answer = Answer(
            job,
            Text(),
            self.words,
            self._head(Text.prefix),
            tops is not None,
            texts if echo else None,
        )
        return await self._send(request, answer, stream, usage)

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        if "messages" in body:
            called = tools.asked(body)
            ids = await self.words.chat(*self.toolbox.prompt(asking.messages(body), called))
        else:
            prompt = body.get("prompt")
            asking.check_text("prompt", prompt)
            special = asking.flag(body, "add_special_tokens", True)
            ids = await self.words.prompt(prompt, special) if prompt else []
        told = {"count": len(ids), "max_model_len": self.words.most, "tokens": ids}
        strings = asking.flag(body, "return_token_strs")
        return JSONResponse(
            {**told, "token_strs": [self.words.text(token) for token in ids] if strings else None}
        )

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request)
        given = body.get("tokens")
        if given == []:
            return JSONResponse({"prompt": ""})
        if not isinstance(given, list):
            raise wrong("tokens", given, "a list of token ids")
        (ids,) = asking.prompts({"prompt": [given]})
        assert isinstance(ids, list)
        return JSONResponse({"prompt": self.words.decode(await self.words.prompt(ids))})

    async def embed(self) -> Response:
        raise Problem(
            404,
            f"{self.model!r} writes texts; embeddings are what an encoder makes, and this "
            "server has none.",
            code="model_not_found",
        )

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._model())

    async def health(self) -> Response:
        return Response(status_code=200 if self.desk.healthy else 503)

    async def metrics(self) -> Response:
        return Response(self.desk.prometheus(), media_type=METRICS)

    async def stats(self) -> Response:
        return JSONResponse(self.desk.stats())

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def tokenizer_info(self) -> Response:
        return JSONResponse(self.words.info())

    async def _matcher(
        self, body: dict[str, Any], wanted: StructuredOutputsParams | None
    ) -> Matcher | None:
        """Compiled, off the event loop and one at a time: a hostile grammar may take seconds."""
        if wanted is None:
            return None
        matchers = self.desk.llm.matchers
        if (known := matchers.known(wanted)) is not None:
            return known
        if self._waiting >= MOST_GRAMMARS:
            raise Problem(
                503,
                f"{self._waiting} grammars wait to be compiled; try again in a moment.",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._waiting += 1
        try:
            async with self._compiling:
                return await asyncio.to_thread(matchers.compile, wanted, True)
        except UserError as error:
            asked = ("tools", "response_format", "structured_outputs", *asking.GUIDED)
            param = next((name for name in asked if body.get(name)), None)
            raise Problem(400, str(error), param) from None
        finally:
            self._waiting -= 1

    async def _body(self, request: Request) -> dict[str, Any]:
        body = await read(request)
        self._check_model(body.get("model"))
        asking.check_fields(body)
        return body

    def _check_model(self, name: Any) -> None:
        if name is not None and name != self.model:
            if not isinstance(name, str):
                raise wrong("model", name, "a text")
            raise Problem(
                404,
                f"model {name!r}: this server has {self.model!r} alone.",
                "model",
                "model_not_found",
            )

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "billfish",
            "max_model_len": self.words.most,
        }

    def _head(self, prefix: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": "",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    async def _send(self, request: Request, answer: Answer, stream: bool, usage: bool) -> Response:
        """From here on the job is closed whatever happens."""
        if stream:
            return Events(answer, usage)
        try:
            return JSONResponse(await unless_gone(request, answer.whole()))
        finally:
            answer.job.close()


class Events(StreamingResponse):
    """A stream that closes its job when it ends, whoever ends it."""

    def __init__(self, answer: Answer, usage: bool) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(answer.events(usage), 200, headers, "text/event-stream")
        self._job: Job = answer.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.close()


async def unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Its result; ClientDisconnect, and the work is cancelled, if nobody waits for it any more."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def make(service: Service, key: str | None, host: str, most: int) -> Guard:
    """`most`: requests under way."""
    # No pages of FastAPI's own: they load scripts from elsewhere.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    app.add_api_route("/v1/completions", service.complete, methods=["POST"])
    app.add_api_route("/v1/embeddings", service.embed, methods=["POST"])
    app.add_api_route("/tokenize", service.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", service.detokenize, methods=["POST"])
    pages: dict[str, Any] = {
        "/v1/models": service.models,
        "/v1/models/{name:path}": service.one_model,
        **{
            f"/{name}": getattr(service, name)
            for name in ("health", "metrics", "stats", "version", "tokenizer_info")
        },
        **{path: _static((PAGE / file).read_bytes(), kind) for path, (file, kind) in FILES.items()},
    }
    for path, answer in pages.items():
        app.add_api_route(path, answer, methods=["GET", "HEAD"])

    @app.exception_handler(Problem)
    async def refused(_: Request, problem: Problem) -> Response:
        return problem.response()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        told = f"{request.method} {request.url.path}: {error.detail}. See the README."
        return Problem(error.status_code, told, headers=dict(error.headers or {})).response()

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return PlainTextResponse("", 499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return internal().response()  # starlette raises the error once more, for the log

    return Guard(app, key, host, most)


def _static(content: bytes, kind: str) -> Any:
    headers = {"content-security-policy": CSP, "cache-control": "no-cache"}

    async def answer() -> Response:
        return Response(content, 200, headers, kind)

    return answer
