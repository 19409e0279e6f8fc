"""Runs inside .venv-vllm, which has no Billfish: greedy tokens of one directory by stock vLLM.

    python worker.py DIRECTORY TENSOR_PARALLEL PROMPTS MAX_TOKENS

PROMPTS is JSON, a list of lists of token ids, so that no tokenizer is needed. The last line of
stdout is JSON: {"tokens": [[id, ...], ...], "logprobs": [[of the token chosen, ...], ...]}.
"""

import json
import os
import sys


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and the processes it starts log to stdout, also after the answer
    from vllm import LLM, SamplingParams

    directory, tensor_parallel, prompts, max_tokens = sys.argv[1:]
    llm = LLM(
        directory,
        tensor_parallel_size=int(tensor_parallel),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=int(max_tokens), ignore_eos=True, detokenize=False, logprobs=0
    )
    requests = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    outputs = [request.outputs[0] for request in llm.generate(requests, greedy, use_tqdm=False)]
    tokens = [list(output.token_ids) for output in outputs]
    logprobs = [
        [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
        for output in outputs
    ]
    print(json.dumps({"tokens": tokens, "logprobs": logprobs}), file=answer, flush=True)


if __name__ == "__main__":  # vLLM spawns its engine, which imports this file again
    main()
