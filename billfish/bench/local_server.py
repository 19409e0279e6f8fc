"""`bench serve` without a running server: starts one for each variant of a random or stored model.

Each runs in a process of its own, since load generator and server must not share an interpreter.
Before the load it reports the speed of its engine for a single text, which shows the cost of HTTP.
"""

import asyncio
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from billfish.bench import serve
from billfish.bench.generate import GenerateBench
from billfish.bench.random_model import numbered
from billfish.bench.serve import Load, Result, Say
from billfish.bench.variants import GenerateRequest, ModelVariant
from billfish.engine.llm import LLM
from billfish.engine.params import SamplingParams
from billfish.errors import UserError
from billfish.models.compute import device_of
from billfish.server.run import ServerSettings, bind, run_server

ALONE, ROUNDS = (64, 256), 5  # tokens in and out of the single text, and its repetitions
SECONDS = 600  # for loading and compiling


@dataclass(frozen=True)
class LocalServer:
    request: GenerateRequest  # only its fields about the model are used
    device: str
    tokens: int  # of prompt and text together, at most
    sequences: int


@dataclass(frozen=True)
class Ready:
    url: str
    card: Result
    tokens_per_s: float  # of the engine alone


def measure_variants(
    own: LocalServer, load: Load, say: Say, keep: Callable[[Result], None]
) -> Result:
    """{"servers": for each variant the result of serve.measure_server and of a single text}"""
    servers: list[Result] = []
    load = replace(load, model=None, key=None)  # a local server has one model and no key
    result: Result = {
        "bench": "serve",
        "result_version": serve.RESULT_VERSION,
        "model": own.request.model,
        "random": own.request.random,
        "max_num_seqs": own.sequences,
        "complete": False,
        "servers": servers,
    }
    for variant in own.request.variants:
        say(f"{variant}: loading")
        with serving(own, variant) as ready:
            told = {"variant": str(variant), "card": ready.card, "alone": _alone(ready, load)}
            servers.append(told)

            def tell(message: str, variant: ModelVariant = variant) -> None:
                say(f"{variant}: {message}")

            def note(part: Result, told: Result = told) -> None:
                told |= part
                keep(result)

            serve.measure_server(replace(load, url=ready.url), tell, note)
    result["complete"] = True
    keep(result)
    return result


def _alone(ready: Ready, load: Load) -> Result:
    """One text at a time over HTTP, against the engine's stream without HTTP."""
    one = replace(
        load,
        url=ready.url,
        rates=(math.inf,),
        requests=1,
        input=(ALONE[0],) * 2,
        output=(ALONE[1],) * 2,
    )
    found = [serve.measure_server(one, lambda _: None, lambda _: None) for _ in range(ROUNDS)]
    http = 1e3 / statistics.median(each["points"][0]["tpot_ms"]["mean"] for each in found)
    return {
        "tokens": list(ALONE),
        "engine_tokens_per_s": ready.tokens_per_s,
        "http_tokens_per_s": http,
        "ratio": http / ready.tokens_per_s,
    }


@contextmanager
def serving(own: LocalServer, variant: ModelVariant) -> Iterator[Ready]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_host, args=(there, own, variant), daemon=True)
    process.start()
    there.close()
    try:
        try:
            told = here.recv() if here.poll(SECONDS) else f"not ready after {SECONDS} s"
        except EOFError:
            process.join(5)
            told = f"its process ended with code {process.exitcode} while it was loading"
        if not isinstance(told, Ready):
            raise UserError(f"the server of {variant}: {told}")
        yield told
    finally:
        process.terminate()  # SIGTERM: the server finishes its requests
        process.join(20)
        process.kill()
        process.join()


def _host(there: Connection, own: LocalServer, variant: ModelVariant) -> None:
    try:
        model_run = GenerateBench(own.request, device_of(own.device))
        model, tokenizer = model_run.load(variant)
        if own.request.random:
            tokenizer = numbered(model.config.vocab_size)
        # No prefix cache: prompts are drawn from few tokens and would share prefixes.
        most = min(max(own.tokens, sum(ALONE)), model.config.max_position_embeddings)
        llm = LLM.of(
            model,
            tokenizer,
            given=True,
            kv=variant.kv,
            max_num_seqs=own.sequences,
            max_model_len=most,
            prefix_caching=False,
        )
        settings = ServerSettings(str(variant), port=0)
        bound = bind(settings)
        bound.listen()  # clients that connect before the server is up wait
        speeds = [asyncio.run(_streamed(llm)) for _ in range(ROUNDS)]
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        ready: Any = Ready(url, model_run.facts, statistics.median(speeds))
    except Exception as error:
        there.send(str(error) if isinstance(error, UserError) else repr(error))
        return
    there.send(ready)
    run_server(llm, settings, bound, lambda told: None)


async def _streamed(llm: LLM) -> float:
    count, params = ALONE[1], SamplingParams(max_tokens=ALONE[1], temperature=0, ignore_eos=True)
    first = 0.0
    async for _ in llm.stream(list(range(ALONE[0])), params):
        first = first or time.perf_counter()
    return (count - 1) / (time.perf_counter() - first)
