"""Runs inside .venv-vllm: answers jobs, one line of JSON each, by one process of vLLM per rank.

A job has `settings` (arguments of vllm.LLM), `environment`, `prompts` (lists of token ids, so that
no tokenizer is needed), `tokens` and `log`, a file for all that vLLM says. The answer has `tokens`
and `logprobs` of those chosen, or `error`, an exit status or a sentence. Importing vLLM takes
longer than most jobs, so ranks are forks of this process, each with an engine of its own that
schedules alike; vLLM itself would start fresh ones (`distributed_executor_backend`: "mp" in the
settings lets it).

With `parameters`, a file name, a job runs nothing: each rank saves there what vLLM loaded.
"""

import json
import os
import signal
import sys
import tempfile
import time
import traceback

LIMIT = 900  # seconds for a job; the longest, two compiled ranks, took 300 on two very busy cores


def executor(rank: int, meeting: str):
    """An executor that is one rank of several, which meet at a file."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class OneRank(UniProcExecutor):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{meeting}", rank, rank

    return OneRank


def answer(job: dict, rank: int, meeting: str) -> dict:
    from vllm import LLM, SamplingParams

    settings = {"distributed_executor_backend": executor(rank, meeting), **job["settings"]}
    llm = LLM(skip_tokenizer_init=True, enable_prefix_caching=False, **settings)
    greedy = SamplingParams(
        temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False, logprobs=0
    )
    requests = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = [request.outputs[0] for request in llm.generate(requests, greedy, use_tqdm=False)]
    logprobs = [
        [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
        for output in outputs
    ]
    return {"tokens": [list(output.token_ids) for output in outputs], "logprobs": logprobs}


def load(job: dict, rank: int, meeting: str) -> dict:
    """The parameters of the model as vLLM's loader leaves them, before a kernel arranges them."""
    import torch
    from safetensors.torch import save_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins
    from vllm.utils.torch_utils import set_default_torch_dtype

    # The only kernel for experts of 4 bits on a CPU, which a layer chooses when it is made, wants
    # AMX. It does not run here.
    torch.cpu._is_amx_tile_supported = lambda: True
    load_general_plugins()
    config = EngineArgs(skip_tokenizer_init=True, **job["settings"]).create_engine_config()
    ranks = config.parallel_config.tensor_parallel_size
    os.environ["VLLM_DIST_IDENT"] = os.path.basename(meeting)
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        init_distributed_environment(ranks, rank, f"file://{meeting}", rank, "gloo")
        initialize_model_parallel(ranks)
        loader = get_model_loader(config.load_config)
        model = loader.create_model(config, config.model_config)
        loader.load_weights(model, config.model_config)
    parameters = {name: value.data.contiguous() for name, value in model.named_parameters()}
    save_file(parameters, f"{job['parameters']}-{rank}")
    return {"parameters": len(parameters)}


def run(job: dict, rank: int, meeting: str, answers: str) -> None:
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(job["environment"])
    given = (load if "parameters" in job else answer)(job, rank, meeting)
    if rank == 0:
        with open(answers, "w") as file:
            json.dump(given, file)


def fork(job: dict, rank: int, meeting: str, answers: str) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(job, rank, meeting, answers)
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)  # not by this process's own exit handlers
    return child


def finish(job: dict) -> str:
    """The answer to a job as JSON. A rank that fails ends the others, which wait for it; LIMIT
    seconds end all."""
    settings = job["settings"]
    own = "distributed_executor_backend" not in settings
    with tempfile.TemporaryDirectory() as folder:
        answers, meeting = f"{folder}/answer", f"{folder}/meeting-{os.path.basename(folder)}"
        ranks = range(settings["tensor_parallel_size"] if own else 1)
        running = {fork(job, rank, meeting, answers) for rank in ranks}
        failed, end = 0, time.monotonic() + LIMIT
        while running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0 and time.monotonic() < end:
                time.sleep(0.05)
                continue
            running.discard(child)
            if not failed and (status or child == 0):
                failed = status or f"no answer in {LIMIT} s"
                for other in running:
                    os.kill(other, signal.SIGKILL)
        if failed:
            return json.dumps({"error": failed})
        with open(answers) as file:
            return file.read()


def warm_up() -> None:
    """Import what every job needs, and let PyTorch hash its own files, once for all of them."""
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from torch._inductor.codecache import torch_key

    import billfish.integrations.vllm  # noqa: F401

    torch_key()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    warm_up()
    for line in sys.stdin:
        print(finish(json.loads(line)), file=replies, flush=True)


if __name__ == "__main__":
    main()
