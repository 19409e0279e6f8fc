"""`bench generate`: the engine's speed by weight format, KV cache format and batch size.

    prefill           decode
    |-----------------|--------|--------|-- ... --|      ends of steps, on the engine's thread
    start             every sequence has a token  the first text ends

A variant is weights + KV cache, such as w4a16+kv4. Variants run one after the other in one process,
and ratios are against the first. The roofline is the time to read the weights once a step. A
variant or a batch that does not fit in memory is reported, and the others run.
"""

import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import transformers

from billfish.bench import nvml, random_model
from billfish.bench.kernels import circumstances
from billfish.bench.variants import DENSE, GenerateRequest, ModelVariant, type_of
from billfish.checkpoints.match import model_config
from billfish.checkpoints.read import Checkpoint
from billfish.engine.build import BUDGET, CPU_CACHE, PAGE_TOKENS, apart
from billfish.engine.core import Engine, RequestOutput
from billfish.engine.kv.cache import FORMATS
from billfish.engine.llm import LLM
from billfish.engine.sampling import SamplingParams
from billfish.errors import UserError
from billfish.kernels.device import gpu
from billfish.models.compute import name_of
from billfish.models.load import load

Result = dict[str, Any]
RESULT_VERSION = 1
# Measured read bandwidth in bytes a second; for other cards --bandwidth gives it.
READS = {"NVIDIA H200": 4.54e12}
CARD_SHARE = 0.9  # of a card's memory for weights and cache, unless --memory is given
WARM_TOKENS = 64  # of the warm-up round, in which all kernels and batch sizes run once
ALL_THERE = 10.0  # seconds that the first step waits for all prompts, see _Steps


class GenerateBench:
    """One request on one device. `keep` is given the result so far after each point."""

    def __init__(
        self,
        request: GenerateRequest,
        device: torch.device,
        say: Callable[[str], None] = lambda message: None,
        keep: Callable[[Result], None] = lambda result: None,
    ) -> None:
        self.request, self.device, self.say, self.keep = request, device, say, keep
        self.facts = device_facts(device)
        self.bandwidth = request.bandwidth or READS.get(self.facts["name"])
        self.memory = request.memory
        most = self.facts["memory_bytes"]
        if self.memory is None and device.type == "cuda":
            self.memory = int(CARD_SHARE * most)
        if self.memory is not None and self.memory > most:
            raise UserError(
                f"--memory {self.memory / 1e9:.1f} GB: {self.facts['name']} has {most / 1e9:.1f} "
                "GB. Give less."
            )
        if request.energy and nvml.joules(device) is None:
            raise UserError(
                f"--energy: no energy counter of {self.facts['name']} can be read. It is NVML's, "
                "of NVIDIA GPUs since Volta: pip install 'billfish[bench]'; or leave it out."
            )
        if request.random:
            self.config = random_model.config_of(request.model)
            for scheme in {request.scheme(variant) for variant in request.variants} - {None}:
                shell = random_model.empty_model(self.config, torch.float16)
                # raises if a scheme does not fit
                random_model.planned_bytes(shell, scheme, request.head_bits)
        else:
            self.config = model_config(Checkpoint(request.model))
        context = getattr(self.config, "max_position_embeddings", math.inf)
        if request.tokens > context:
            raise UserError(
                f"--input {request.input} and --output {request.output}: together {request.tokens} "
                f"tokens, and {request.model} was made for {context}. Shorten one of them."
            )

    def measure(self) -> Result:
        """Raises UserError if no variant could be measured."""
        told = circumstances(self.facts)
        del told["commit"]  # a version identifies these results; commits those of kernels
        self.variants: list[Result] = []
        self.result = {
            "bench": "generate",
            "result_version": RESULT_VERSION,
            "complete": False,
            **told,
            "transformers": transformers.__version__,
            "settings": {
                **asdict(self.request),
                "variants": [str(variant) for variant in self.request.variants],
                "memory": self.memory,
                "bandwidth": self.bandwidth,
            },
            "variants": self.variants,
        }
        for variant in self.request.variants:
            found: Result = {"variant": str(variant), **asdict(variant), "error": None}
            self.variants.append(found | {"points": [], "best": None})
            try:
                self._variant(variant, self.variants[-1])
            except torch.OutOfMemoryError as error:
                self.variants[-1]["error"] = f"out of memory: {str(error).splitlines()[0]}"
            except UserError as error:
                self.variants[-1]["error"] = str(error)
            self._keep()
            gc.collect()  # models are in reference cycles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if not any(good(found) for found in self.variants):
            told_once = dict.fromkeys(why for found in self.variants for why in reasons(found))
            raise UserError("nothing could be measured. " + " ".join(told_once))
        self.result["complete"] = True
        self._keep()
        return self.result

    def _keep(self) -> None:
        against_first(self.variants)
        self.keep(self.result)

    def _variant(self, variant: ModelVariant, into: Result) -> None:
        request = self.request
        started = time.perf_counter()
        model, tokenizer = self.load(variant)
        # Counted now: a decoder may fuse linears, and then one of them holds the weights of all.
        held, read = random_model.held_bytes(model), random_model.read_bytes(model)
        token = FORMATS[variant.kv].bytes_a_token(*self._kv_shape(), model.dtype)
        each = math.ceil(request.tokens / PAGE_TOKENS[self.device.type])  # pages
        sequence = each * PAGE_TOKENS[self.device.type] * token
        memory = held + CPU_CACHE if self.memory is None else self.memory
        budget = request.max_batched_tokens or BUDGET[self.device.type]
        fit = min((memory - held) // sequence, budget)
        into |= {
            "dtype": name_of(model.dtype),
            "weight_bytes": held,
            "read_bytes": read,  # of the weights, every step
            "kv_bytes_a_token": token,
            "largest_batch": max(0, fit),
            "load_seconds": time.perf_counter() - started,
        }
        room = (
            f"{max(0, memory - held) / 1e9:.2f} GB of {memory / 1e9:.2f} are left for the cache, a "
            f"sequence of {request.tokens} tokens takes {sequence / 1e9:.3f}"
        )
        if fit < 1:
            raise UserError(_way_out(f"weights take {held / 1e9:.2f} GB, {room}"))
        wanted = dict.fromkeys(fit if batch is None else batch for batch in request.batches)
        for batch in sorted(wanted):
            if batch > fit:
                why = f"{batch} sequences: {fit} fit. {_way_out(room)}"
                into["points"].append({"batch": batch, "error": why})
        batches = [batch for batch in sorted(wanted) if batch <= fit]
        if not batches:
            return
        with LLM.of(
            model,
            tokenizer,
            given=True,
            kv=variant.kv,
            max_model_len=request.tokens,
            max_num_seqs=max(batches),
            max_batched_tokens=request.max_batched_tokens,
            pages=max(batches) * each + 1,  # one more: an engine may use a page for padding
            prefix_caching=False,
        ) as llm:
            for batch in batches:
                into["points"].append(self._point(llm, batch, into))
                into["points"].sort(key=lambda point: int(point["batch"]))
                self._keep()

    def load(self, variant: ModelVariant) -> tuple[Any, Any]:
        return apart(self.device.type, partial(self._load, variant))

    def _load(self, variant: ModelVariant) -> tuple[Any, Any]:
        self.say(f"{variant}: loading")
        if not self.request.random:
            return load(self.request.model, self.request.dtype, str(self.device))
        dtype = DENSE.get(variant.weights) or type_of(self.device, self.request.dtype)
        scheme, head_bits = self.request.scheme(variant), self.request.head_of(variant)
        model = random_model.empty_model(self.config, dtype)
        planned = random_model.planned_bytes(model, scheme, head_bits)
        if planned >= (self.memory or math.inf):  # before memory is filled
            told = f"weights take {planned / 1e9:.2f} GB of {(self.memory or 0) / 1e9:.2f}"
            raise UserError(_way_out(told))
        random_model.fill(model, scheme, self.device, self.say, head_bits)
        return model, random_model.Silent()

    def _kv_shape(self) -> tuple[int, int, int]:
        config = self.config
        heads: int = config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return config.num_hidden_layers, kv_heads, head

    def _point(self, llm: LLM, batch: int, variant: Result) -> Result:
        request = self.request
        generator = torch.Generator().manual_seed(0)
        size = (batch, request.input)
        prompts = torch.randint(0, llm.vocabulary, size, generator=generator).tolist()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        rounds: list[Result] = []
        used = None
        for index in range(request.rounds + 1):
            if index == 1 and request.energy:
                used = nvml.joules(self.device)
            self.say(f"{variant['variant']}, batch {batch}, round {index} of {request.rounds}")
            output = request.output if index else min(request.output, WARM_TOKENS)
            params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
            with _Steps(llm.engine, batch) as steps:
                outputs = llm.generate(prompts, params)
                steps.ended = time.perf_counter()
            failed = [one.error for request in outputs for one in request.outputs if one.error]
            if failed:
                return {"batch": batch, "error": failed[0]}
            if index:  # round 0 is the warm-up
                rounds.append(steps.figures(output))
        point: Result = {"batch": batch, "error": None, "rounds": rounds, "peak_bytes": None}
        if self.device.type == "cuda":
            point["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        if used is not None and (now := nvml.joules(self.device)) is not None:
            seconds = sum(told["seconds"] for told in rounds)
            tokens = len(rounds) * batch * request.output
            point["energy"] = cost(now - used, seconds, tokens, request.price)
        for name in rounds[0]:
            found = [told[name] for told in rounds if told[name] is not None]
            point[name] = statistics.median(found) if found else None
        step = point["step_seconds"]
        point["decode_tokens_per_s"] = batch / step if step else None
        kv = batch * (request.input + request.output / 2) * variant["kv_bytes_a_token"]
        return point | decode_roofline(variant["read_bytes"], kv, step, self.bandwidth)


class _Steps:
    """Inside `with`, records when each step of the engine ended and how many tokens it brought.

    The first step waits until all prompts have arrived; otherwise the engine would begin with the
    first ones and split the batch in two.
    """

    def __init__(self, engine: Engine, batch: int) -> None:
        self.engine, self.batch = engine, batch
        self.ends: list[tuple[float, int, bool]] = []  # time, tokens, whether all have begun
        self.ended = 0.0

    def __enter__(self) -> "_Steps":
        inner, texts = self.engine.step, list[list[int]]()

        def step() -> list[RequestOutput]:
            late = time.perf_counter() - self.started > ALL_THERE
            if not self.ends and len(self.engine.runs) < self.batch and not late:
                time.sleep(1e-4)
                return []
            if not texts:  # counted here, since a step may return the text of the step before
                texts.extend(run.sequence.output for run in self.engine.runs.values())
            before = sum(map(len, texts))
            outputs = inner()
            tokens = sum(map(len, texts)) - before
            self.ends.append((time.perf_counter(), tokens, all(texts)))
            return outputs

        vars(self.engine)["step"] = step  # hides the method
        self.started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        del vars(self.engine)["step"]

    def figures(self, output: int) -> Result:
        """Decode time is that of steps after the prompts which bring every sequence a token; None
        without such steps: in a large batch the first texts end before the last prompt begins."""
        place = next(i for i, (_, _, all_begun) in enumerate(self.ends) if all_begun)
        first, after = self.ends[place][0], self.ends[place + 1 :]
        full = [end for end, tokens, _ in after if tokens == self.batch]
        step = (full[-1] - first) / len(full) if full else None
        return {
            "seconds": self.ended - self.started,
            "tokens_per_s": self.batch * output / (self.ended - self.started),
            "prefill_seconds": first - self.started,
            "step_seconds": step,
            "steps": len(self.ends),
            "decode_steps": len(full),
        }


def decode_roofline(
    weights: float, kv: float, seconds: float | None, bandwidth: float | None
) -> Result:
    """Of a decode step; `kv`: bytes of KV cache that it reads on average. None where the bandwidth
    is unknown or no step was timed."""
    floor, both = (each / bandwidth if bandwidth else None for each in (weights, weights + kv))
    return {
        "kv_read_bytes": kv,
        "floor_seconds": floor,
        "roofline": floor / seconds if floor and seconds else None,
        "roofline_with_kv": both / seconds if both and seconds else None,
    }


def cost(joules: float, seconds: float, tokens: int, price: float | None) -> Result:
    """Of the whole card over all rounds, prompts included; `price` is that of a kilowatt hour."""
    kilowatt_hours = joules / 3.6e6 / tokens * 1e6
    return {
        "watts": joules / seconds,
        "joules_per_token": joules / tokens,
        "cost_per_million_tokens": None if price is None else kilowatt_hours * price,
    }


def good(variant: Result) -> list[Result]:
    return [point for point in variant["points"] if not point["error"]]


def reasons(variant: Result) -> list[str]:
    """Why a variant, or some of its points, could not be measured."""
    told = (variant, *variant["points"])
    return [f"{variant['variant']}: {each['error']}" for each in told if each["error"]]


def against_first(variants: list[Result]) -> None:
    """Ratios to the first variant, at equal batch sizes and between the best of each."""
    first = {point["batch"]: point for point in good(variants[0])}
    for variant in variants:
        for point in good(variant):
            other = first.get(point["batch"], {})
            for name in ("decode_tokens_per_s", "tokens_per_s"):
                known = other.get(name) and point[name]
                point[f"{name}_ratio"] = point[name] / other[name] if known else None
        best = max(good(variant), key=lambda point: float(point["tokens_per_s"]), default=None)
        if best is not None:
            variant["best"] = {"batch": best["batch"], "tokens_per_s": best["tokens_per_s"]}
            top = variants[0]["best"]
            variant["best"]["ratio"] = top and best["tokens_per_s"] / top["tokens_per_s"]


def device_facts(device: torch.device) -> Result:
    if device.type == "cuda":
        card = gpu(device)
        memory = torch.cuda.get_device_properties(device).total_memory
        return {"name": card.name, "arch": card.arch, "memory_bytes": memory}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    threads = torch.get_num_threads()
    return {"name": f"CPU, {threads} threads", "arch": platform.machine(), "memory_bytes": memory}


def _way_out(told: str) -> str:
    return f"{told}. Raise --memory, shorten --input or --output, or take fewer bits (w4a16, kv4)."
