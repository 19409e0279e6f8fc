"""The HTTP routes: OpenAI's, and a few of vLLM's. Each parses its body, generates, and responds."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from billfish.engine.llm import LLM
from billfish.engine.structured import Matcher, StructuredOutputsParams
from billfish.errors import UserError
from billfish.server import protocol, tools
from billfish.server.admission import Admission
from billfish.server.errors import ApiError, internal_error, invalid, queue_full
from billfish.server.fields import check_fields
from billfish.server.middleware import AccessControl, read_body
from billfish.server.protocol import parse_request
from billfish.server.responses import ChatChoice, Reply, TextChoice
from billfish.server.sampling import STRUCTURED, sampling_params, structured_outputs
from billfish.server.tokenization import Tokenization
from billfish.server.tools import ToolSupport
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
MAX_COMPLETION = 16  # OpenAI's default of max_tokens for /v1/completions
MAX_GRAMMARS = 32  # that wait to be compiled


class Service:
    """One model behind the routes."""

    def __init__(self, llm: LLM, model: str, max_queue: int, parser: str = "auto") -> None:
        self.admission, self.tokenizer = Admission(llm, model, max_queue), Tokenization(llm)
        self.model, self.tools = model, ToolSupport(llm.tokenizer, parser)
        self._compiling, self._waiting = asyncio.Lock(), 0
        self.created = int(time.time())
        # Servers with equal fingerprints generate equal texts from equal seeds.
        told = f"{__version__} {model} {type(llm.engine.runner).__name__} {llm.max_model_len}"
        self.fingerprint = "fp_" + hashlib.sha256(told.encode()).hexdigest()[:12]

    async def chat(self, request: Request) -> Response:
        body = parse_request(protocol.ChatRequest, await self._body(request))
        self.admission.check(body.n)
        wanted, called, more = structured_outputs(body), tools.requested(body), {}
        if called is not None:
            self.tools.check(called)
            wanted = self.tools.grammar(called, wanted)
            more = {"skip_special_tokens": False} if self.tools.shows_special else {}
        ids = await self._chat_ids(body, called)
        self.tokenizer.check_length(ids, body.limit)
        limit = body.limit or self.tokenizer.max_tokens - len(ids)
        top = body.top_logprobs or 0 if body.logprobs else None
        matcher = await self._matcher(body, wanted)
        params = sampling_params(body, limit, top, self.admission.llm, matcher, **more)
        reply = Reply(
            self.admission.enter([ids], params),
            ChatChoice(),
            self.tokenizer,
            self._head(ChatChoice.prefix),
            body.logprobs,
            tools=self.tools.format if called else None,
        )
        return await self._send(request, reply, body)

    async def complete(self, request: Request) -> Response:
        body = parse_request(protocol.CompletionRequest, await self._body(request))
        self.admission.check(len(body.prompt) * body.n)
        prompts = [await self.tokenizer.prompt(one, body.add_special_tokens) for one in body.prompt]
        limit = MAX_COMPLETION if body.limit is None else body.limit
        for ids in prompts:
            self.tokenizer.check_length(ids, limit)
        matcher = await self._matcher(body, structured_outputs(body))
        params = sampling_params(body, limit, body.logprobs, self.admission.llm, matcher)
        texts = [one if isinstance(one, str) else self.tokenizer.decode(one) for one in body.prompt]
        reply = Reply(
            self.admission.enter(prompts, params),
            TextChoice(),
            self.tokenizer,
            self._head(TextChoice.prefix),
            body.logprobs is not None,
            texts if body.echo else None,
        )
        return await self._send(request, reply, body)

    async def tokenize(self, request: Request) -> Response:
        given = await self._body(request)
        body: protocol.TokenizeChat | protocol.TokenizeText
        if "messages" in given:
            body = parse_request(protocol.TokenizeChat, given)
            ids = await self._chat_ids(body, tools.requested(body))
        else:
            body = parse_request(protocol.TokenizeText, given)
            special = body.add_special_tokens
            ids = await self.tokenizer.prompt(body.prompt, special) if body.prompt else []
        strings = [self.tokenizer.text(token) for token in ids] if body.return_token_strs else None
        told = {"count": len(ids), "max_model_len": self.tokenizer.max_tokens, "tokens": ids}
        return JSONResponse({**told, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        ids = parse_request(protocol.Detokenize, await self._body(request)).tokens
        return JSONResponse({"prompt": self.tokenizer.decode(await self.tokenizer.prompt(ids))})

    async def embed(self) -> Response:
        raise ApiError(
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
        return Response(status_code=200 if self.admission.healthy else 503)

    async def metrics(self) -> Response:
        return Response(self.admission.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def stats(self) -> Response:
        return JSONResponse(self.admission.stats())

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def tokenizer_info(self) -> Response:
        return JSONResponse(self.tokenizer.info())

    async def _chat_ids(self, body: protocol.ChatPrompt, called: tools.Tools | None) -> list[int]:
        return await self.tokenizer.chat(*self.tools.prompt(body.template_messages(), called))

    async def _matcher(
        self, body: protocol.Generating, wanted: StructuredOutputsParams | None
    ) -> Matcher | None:
        """Compiles off the event loop and one at a time: a hostile grammar may take seconds."""
        if wanted is None:
            return None
        matchers = self.admission.llm.matchers
        if (known := matchers.known(wanted)) is not None:
            return known
        if self._waiting >= MAX_GRAMMARS:
            raise queue_full(
                f"{self._waiting} grammars wait to be compiled; try again in a moment."
            )
        self._waiting += 1
        try:
            async with self._compiling:
                return await asyncio.to_thread(matchers.compile, wanted, True)
        except UserError as error:
            asked = [name for name in ("tools", *STRUCTURED) if getattr(body, name, None)]
            raise ApiError(400, str(error), asked[0] if asked else None) from None
        finally:
            self._waiting -= 1

    async def _body(self, request: Request) -> dict[str, Any]:
        body = await read_body(request)
        self._check_model(body.get("model"))
        check_fields(body)
        return body

    def _check_model(self, name: Any) -> None:
        if name is not None and name != self.model:
            if not isinstance(name, str):
                raise invalid("model", name, "a text")
            told = f"model {name!r}: this server has {self.model!r} alone."
            raise ApiError(404, told, "model", "model_not_found")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "billfish",
            "max_model_len": self.tokenizer.max_tokens,
        }

    def _head(self, prefix: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": "",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    async def _send(self, request: Request, reply: Reply, body: protocol.Generating) -> Response:
        """Closes the generation whatever happens."""
        if body.stream:
            return Events(reply, body.wants_usage)
        try:
            return JSONResponse(await until_disconnect(request, reply.complete()))
        finally:
            reply.generation.close()


class Events(StreamingResponse):
    """A stream of server-sent events that closes its generation, whoever ends it."""

    def __init__(self, reply: Reply, usage: bool) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(reply.events(usage), 200, headers, "text/event-stream")
        self._generation = reply.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`. A client that disconnects cancels it and raises ClientDisconnect."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def make_app(service: Service, key: str | None, host: str, max_requests: int) -> AccessControl:
    # FastAPI's documentation pages load scripts from another host.
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

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        told = f"{request.method} {request.url.path}: {error.detail}. See the README."
        return ApiError(error.status_code, told, headers=dict(error.headers or {})).response()

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return PlainTextResponse("", 499)  # the client has gone: nobody reads it

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return internal_error().response()  # starlette raises the error once more, for the log

    return AccessControl(app, key, host, max_requests)


def _static(content: bytes, kind: str) -> Any:
    headers = {"content-security-policy": CSP, "cache-control": "no-cache"}

    async def answer() -> Response:
        return Response(content, 200, headers, kind)

    return answer
