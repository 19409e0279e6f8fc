"""`bench serve` with servers of its own, one for each variant of a model, random or stored. Each is
a process of its own: load and answers must not share one interpreter. Before it is asked anything
it says how fast its engine writes a single text, so that what HTTP costs can be told.
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
from billfish.bench.generate import Run
from billfish.bench.random_model import numbered
from billfish.bench.serve import Load, Result, Say
from billfish.bench.variants import GenerateRequest, Variant
from billfish.engine.llm import LLM
from billfish.engine.params import SamplingParams
from billfish.errors import UserError
from billfish.models.compute import device_of
from billfish.server.run import ServerSettings, bind, run_server

ALONE, ROUNDS = (64, 256), 5  # tokens in and out of the single text, and how often it is written
SECONDS = 600  # to load and to compile


@dataclass(frozen=True)
class Own:
    request: GenerateRequest  # of it only what is about the model
    device: str
    tokens: int  # of a prompt and its text, at most
    sequences: int


@dataclass(frozen=True)
class Ready:
    url: str
    card: Result
    tokens_per_s: float  # of the engine alone


def measure(own: Own, load: Load, say: Say, keep: Callable[[Result], None]) -> Result:
    """{"servers": for each variant what serve.measure tells, and of a text alone}"""
    servers: list[Result] = []
    load = replace(load, model=None, key=None)  # whatever a server calls its model; none has a key
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

            def tell(message: str, variant: Variant = variant) -> None:
                say(f"{variant}: {message}")

            def note(part: Result, told: Result = told) -> None:
                told |= part
                keep(result)

            serve.measure(replace(load, url=ready.url), tell, note)
    result["complete"] = True
    keep(result)
    return result


def _alone(ready: Ready, load: Load) -> Result:
    """One text at a time over HTTP, against the engine's own stream."""
    one = replace(
        load,
        url=ready.url,
        rates=(math.inf,),
        requests=1,
        input=(ALONE[0],) * 2,
        output=(ALONE[1],) * 2,
    )
    found = [serve.measure(one, lambda _: None, lambda _: None) for _ in range(ROUNDS)]
    http = 1e3 / statistics.median(each["points"][0]["tpot_ms"]["mean"] for each in found)
    return {
        "tokens": list(ALONE),
        "engine_tokens_per_s": ready.tokens_per_s,
        "http_tokens_per_s": http,
        "ratio": http / ready.tokens_per_s,
    }


@contextmanager
def serving(own: Own, variant: Variant) -> Iterator[Ready]:
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
        process.terminate()  # the server finishes what it has begun
        process.join(20)
        process.kill()
        process.join()


def _host(there: Connection, own: Own, variant: Variant) -> None:
    try:
        model_run = Run(own.request, device_of(own.device))
        model, tokenizer = model_run.load(variant)
        if own.request.random:
            tokenizer = numbered(model.config.vocab_size)
        # No prefix cache: prompts are drawn from few tokens, and none shall be free.
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
        bound.listen()  # whoever comes before the server is up waits
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
