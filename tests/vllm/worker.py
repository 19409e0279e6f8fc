"""Runs inside .venv-vllm: answers jobs, one line of JSON each, by one process of vLLM each.

A job has `settings` (arguments of vllm.LLM), `environment`, `prompts` (lists of token ids, so that
no tokenizer is needed), `tokens` and `log`, a file for all that vLLM says. The answer has `tokens`
and `logprobs` of those chosen, or `error`, an exit status. Importing vLLM takes longer than most
jobs, so they are forks of this process, and without tensor parallelism the engine runs in the fork
itself.
"""

import json
import os
import sys


def answer(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    llm = LLM(skip_tokenizer_init=True, enable_prefix_caching=False, **job["settings"])
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


def run(job: dict, answers: int) -> None:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(job["environment"])
    with os.fdopen(answers, "w") as pipe:
        json.dump(answer(job), pipe)


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
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                run(json.loads(line), writer)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # not this process's own exit handlers
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        print(text if status == 0 else json.dumps({"error": status}), file=replies, flush=True)


if __name__ == "__main__":
    main()
