"""Fuzzing with damaged checkpoints: every command gives a result or one clear error, in time.

A case is a number that seeds the checkpoint, the damage (tests/damage.py) and the order of
commands; BILLFISH_FUZZ_CASE=number repeats it. The suite runs a few cases, `make fuzz`
BILLFISH_FUZZ of them, others for every BILLFISH_FUZZ_SEED.
"""

import faulthandler
import gc
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import stat
import time
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import damage
import pytest
import torch
from safetensors.torch import load_file
from tiny import write_checkpoint

import billfish  # noqa: F401  registers packed loading with transformers
from billfish import LLM, SamplingParams
from billfish.checkpoints.convert import convert
from billfish.checkpoints.inspect import inspect
from billfish.checkpoints.verify import verify
from billfish.engine.single import generate
from billfish.errors import UserError
from billfish.models.generate import Sampling
from billfish.models.load import load
from billfish.offline import costs
from billfish.offline.driver import quantize
from billfish.offline.plan import plan
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16

CASES = int(os.environ.get("BILLFISH_FUZZ", 24))
FIRST = int(os.environ.get("BILLFISH_FUZZ_SEED", 0)) * 10**6
ONE = os.environ.get("BILLFISH_FUZZ_CASE")
SECONDS = 30  # of one command; the slowest takes one
ROOM = 8 * 2**30  # bytes that all of it may take, so that a finding is no end of the machine
GROWTH = 200 * 2**20  # bytes of memory from the 100th case on, however many follow
IDS = torch.arange(2, 12)[None]
RANDOM_WEIGHTS = re.compile(r"newly initialized|not initialized from|MISSING", re.IGNORECASE)
DENSE = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, shards": ("LlamaForCausalLM", {"shard": "60KB"}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "opt": ("OPTForCausalLM", {}),
}


OUTCOMES = Counter()


class TooLong(BaseException):
    pass


class Random(logging.Handler):
    """Hears transformers say that it makes weights up."""

    def emit(self, record):
        if RANDOM_WEIGHTS.search(record.getMessage()):
            raise AssertionError(f"random weights: {record.getMessage()[:300]}")


@contextmanager
def limited():
    def stop(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Name -> (whole checkpoint, its logits)."""
    room = tmp_path_factory.mktemp("whole")
    made = {
        name: write_checkpoint(room / name, architecture, num_hidden_layers=2, **changes)
        for name, (architecture, changes) in DENSE.items()
    }
    for name, scheme in (("packed", W4A16(4, 32)), ("packed, asym", W4A16(4, 32, False))):
        made[name] = room / name
        quantize(QuantizeRequest(made["llama"], made[name], scheme, "rtn"))
    made["packed qwen2"] = room / "packed qwen2"
    quantize(QuantizeRequest(made["qwen2"], made["packed qwen2"], method="rtn"))
    for name, to in (("gptq", "gptq"), ("awq", "awq")):
        made[name] = room / name
        convert(made["packed, asym"], made[name], to)
    return {name: (path, logits(load(path)[0])) for name, path in made.items()}


@torch.inference_mode()
def logits(model):
    return model(input_ids=IDS).logits.float()


# -- the commands


def speak(folder, scratch):
    model, tokenizer = load(folder)
    return "".join(generate(model, tokenizer, "a fish", Sampling(max_tokens=2))[0])


def chat(folder, scratch):
    model, tokenizer = load(folder)
    return "".join(generate(model, tokenizer, "a fish", Sampling(max_tokens=2), chat=True)[0])


def engine(folder, scratch):
    with LLM(folder, device="cpu", pages=8, max_model_len=16) as llm:
        llm.generate(["a fish"], SamplingParams(temperature=0, max_tokens=2))


COMMANDS = {
    "inspect": lambda folder, scratch: inspect(folder),
    "verify": lambda folder, scratch: verify(folder),
    "load": lambda folder, scratch: load(folder)[0],
    "generate": speak,
    "chat": chat,
    "engine": engine,
    "plan": lambda folder, scratch: plan(QuantizeRequest(folder, scratch, method="rtn")),
    "quantize": lambda folder, scratch: quantize(QuantizeRequest(folder, scratch, method="rtn")),
    "convert to gptq": lambda folder, scratch: convert(folder, scratch, "gptq"),
    "convert to awq": lambda folder, scratch: convert(folder, scratch, "awq"),
}


def run(command, folder, scratch):
    """(result, refusal): one of them is None. Whatever else happens is a finding."""
    try:
        with limited():
            return COMMANDS[command](folder, scratch), None
    except UserError as error:
        told = str(error)
        assert told.strip() and len(told) < 1000, f"no message for people: {told[:2000]}"
        return None, told
    except OSError as error:
        if error.errno is None or not error.filename:  # the command line tells the others
            raise
        return None, str(error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def case(number, sources, room):
    """What is wrong with one: a list of sentences."""
    rng = random.Random(number)
    name = rng.choice(sorted(sources))
    whole, expected = sources[name]
    folder, scratch = room / "damaged", room / "scratch"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    packed = "config_groups" in (folder / "config.json").read_text()
    known = [what for what in damage.DAMAGES if packed or what not in damage.PACKED]
    broken, found, refused = [], [], {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if any(
            not stat.S_ISREG(path.lstat().st_mode) or path.lstat().st_size > 2**30
            for path in folder.iterdir()
        ):
            break  # a FIFO, or a sparse file, which the next damage would read
        with suppress(Exception):  # where there is nothing of what it would break
            what = rng.choice(known if rng.random() < 0.5 else sorted(damage.CHANCE))
            damage.DAMAGES[what](folder, rng)
            broken.append(what)
    chosen = ["verify", "load", *rng.sample(sorted(COMMANDS), 3)]
    model = None
    for command in dict.fromkeys(chosen):
        try:
            result, refused[command] = run(command, folder, scratch)
            if command == "load":
                model = result
            if command == "verify" and result is not None and not result["ok"]:
                refused[command] = "not ok"
            OUTCOMES[command, "refused" if refused[command] else "done"] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            found.append(f"{command}: {type(error).__name__} at {where}: {str(error)[:300]}")
    if "verify" in refused and "load" in refused and not refused["verify"] and refused["load"]:
        found.append(f"verify: ok, but load says {refused['load'][:300]}")
    if model is not None:
        found += judge(model, folder, whole, expected)
    return [f"case {number} ({name}; {', '.join(broken)}) {told}" for told in found]


def judge(model, folder, whole, expected):
    """Other numbers than the whole checkpoint's come from its files: never from the dice, and not
    from the same weights read another way."""
    try:
        got = logits(model)
    except (IndexError, RuntimeError, ValueError) as error:
        return [f"load: gives a model that cannot run: {type(error).__name__}: {str(error)[:200]}"]
    if got.shape == expected.shape and torch.equal(got, expected):
        return []
    torch.manual_seed(12345)
    again = logits(load(folder)[0])
    if not torch.equal(got.nan_to_num(), again.nan_to_num()):
        return ["load: random weights"]
    return ["load: other numbers of the same weights"] if same(folder, whole) else []


def same(folder, whole):
    """The same tensors, and a config.json that differs in how they are said to be packed alone."""
    parts = []
    for path in (folder, whole):
        config = json.loads((path / "config.json").read_text())
        config.pop("quantization_config", None)
        tensors = {k: v for file in damage.shards(path) for k, v in load_file(file).items()}
        parts.append((config, tensors))
    (config, tensors), (wanted, originals) = parts
    return (
        config == wanted
        and tensors.keys() == originals.keys()
        and all(torch.equal(tensors[name], originals[name]) for name in tensors)
    )


def memory(column):
    """Bytes: 0, of addresses; 1, resident."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.fuzz
def test_damaged_checkpoints(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(costs, "PROBES", (32, 64))
    monkeypatch.setattr(costs, "DEPTH", 64)
    hears = Random()
    logging.getLogger("transformers").addHandler(hears)
    found, begin, started = [], None, time.process_time()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory(0) + ROOM, before[1]))
    try:
        for number in [int(ONE)] if ONE else range(FIRST, FIRST + CASES):
            faulthandler.dump_traceback_later(10 * SECONDS, exit=True)  # where no signal gets in
            found += case(number, sources, tmp_path)
            if number == FIRST + 100:
                begin = memory(1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        faulthandler.cancel_dump_traceback_later()
        logging.getLogger("transformers").removeHandler(hears)
    print(f"{CASES} checkpoints in {time.process_time() - started:.0f} s of a core", dict(OUTCOMES))
    kinds = Counter(re.sub(r"^case \d+ \(.*?\) ", "", told)[:120] for told in found)
    summary = "\n".join(f"{count} x {kind}" for kind, count in kinds.most_common())
    assert not found, f"{len(found)} findings in {CASES} cases\n{summary}\n\n" + "\n".join(found)
    if begin is not None:
        assert memory(1) - begin < GROWTH, f"{(memory(1) - begin) / 2**20:.0f} MB more"
