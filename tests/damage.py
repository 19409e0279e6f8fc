"""Ways to break a checkpoint, one thing each: for test_hostile.py and for fuzzing.

    DAMAGES[name](folder, random.Random(seed)) -> str

breaks the checkpoint in `folder` in place and returns what an error about it should name: a file, a
tensor or a key ("" where several would do). PACKED holds those that need a packed checkpoint,
CHANCE those that break whatever the dice say and may leave it whole, or with other numbers. The
manifest is taken away, so that what is left to find is in the files. What no file system here can
make (a FIFO on Windows) raises OSError.
"""

import json
import os
import random
import socket
import struct
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from billfish.checkpoints.write import MANIFEST

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER = "tokenizer.json"
DEEP = 10_000
DAMAGES, PACKED, CHANCE = {}, set(), set()


def damage(*kinds, **cases):
    """Registers a function, or one of its cases each: damage(a=(1, 2), b=3) calls
    f(folder, rng, 1, 2) for the case a and f(folder, rng, 3) for b."""

    def register(function):
        base = function.__name__
        for case, values in (cases or {"": ()}).items():
            name = f"{base}_{case}" if case else base

            def run(folder, rng, values=values):
                (folder / MANIFEST).unlink(missing_ok=True)
                return function(folder, rng, *(values if isinstance(values, tuple) else (values,)))

            DAMAGES[name] = run
            for kind in kinds:
                kind.add(name)
        return function

    return register


# -- tools


def shards(folder):
    return sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("billfish"))


def read_raw(file):
    """(header as JSON has it, the bytes behind it)"""
    blob = file.read_bytes()
    length = struct.unpack("<Q", blob[:8])[0]
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def write_raw(file, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def some_tensor(folder, rng, match=""):
    """(shard, tensor) at random among those whose name holds `match`."""
    found = [
        (file, name)
        for file in shards(folder)
        for name in sorted(read_raw(file)[0])
        if name != "__metadata__" and match in name
    ]
    return rng.choice(found)


def edit_entry(folder, rng, change, match=""):
    """Changes one tensor's entry in its shard's header."""
    file, name = some_tensor(folder, rng, match)
    header, data = read_raw(file)
    change(header[name])
    write_raw(file, header, data)
    return name


def edit_tensors(folder, file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(folder, name, change):
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return name


def nested(depth=DEEP):
    return '{"a":' * depth + "1" + "}" * depth


def drop_from_index(folder, name):
    if (folder / INDEX).exists():
        edit_json(folder, INDEX, lambda index: index["weight_map"].pop(name, None))


def replace_file(folder, name, kind):
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "dangling":
        file.symlink_to(folder / "nowhere")
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "socket":
        here = Path.cwd()
        with socket.socket(socket.AF_UNIX) as opened:
            try:
                os.chdir(folder)  # a socket's path is at most 108 bytes long
                opened.bind(name)
            finally:
                os.chdir(here)
    return name


# -- headers of safetensors files


@damage()
def overlapping_offsets(folder, rng):
    """Two tensors claim the same bytes."""
    file, _ = some_tensor(folder, rng)
    header, data = read_raw(file)
    names = [name for name in header if name != "__metadata__"]
    first, second = rng.sample(names, 2)
    header[first]["data_offsets"] = header[second]["data_offsets"]
    header[first]["shape"], header[first]["dtype"] = (
        header[second]["shape"],
        header[second]["dtype"],
    )
    write_raw(file, header, data)
    return file.name


@damage()
def gapped_offsets(folder, rng):
    """Bytes between two tensors that belong to nobody."""
    file, _ = some_tensor(folder, rng)
    header, data = read_raw(file)
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    last = max(entries, key=lambda entry: entry["data_offsets"][1])
    begin = last["data_offsets"][0]
    last["data_offsets"] = [offset + 64 for offset in last["data_offsets"]]
    write_raw(file, header, data[:begin] + bytes(64) + data[begin:])
    return file.name


@damage(
    negative=[-1, -64],
    overflowing=[2**40, 2**40],
    huge=[10**30],
    fraction=[3.5, 2],
    text="64",
    nulls=[None, None],
    truth=[True, True],
    other=[7, 5],
    none=None,
    deep_list=[[64], [64]],
)
def shape(folder, rng, value):
    return edit_entry(folder, rng, lambda entry: entry.update(shape=value))


@damage(
    reversed=lambda a, b: [b, a],
    negative=lambda a, b: [-b, -a],
    behind=lambda a, b: [a + 10**12, b + 10**12],
    one=lambda a, b: [a],
    three=lambda a, b: [a, b, b],
    text=(lambda a, b: [str(a), str(b)],),
    fraction=lambda a, b: [a + 0.5, b + 0.5],
    null=lambda a, b: None,
)
def offsets(folder, rng, change):
    return edit_entry(
        folder, rng, lambda entry: entry.update(data_offsets=change(*entry["data_offsets"]))
    )


@damage(unknown="F13", number=4, list=["F32"], null=None, other="F64")
def dtype(folder, rng, value):
    return edit_entry(folder, rng, lambda entry: entry.update(dtype=value))


@damage(
    not_json=b"{nonsense",
    list=b"[1, 2]",
    number=b"7",
    empty=b"",
    deep=(nested().encode(),),
    not_utf8=b'{"\xff": 1}',
    nothing=b"{}",
)
def header(folder, rng, text):
    file = rng.choice(shards(folder))
    write_raw(file, text, read_raw(file)[1])
    return file.name


@damage(null=None, number=3, list=[1])
def entry(folder, rng, value):
    file, name = some_tensor(folder, rng)
    content, data = read_raw(file)
    content[name] = value
    write_raw(file, content, data)
    return name


@damage()
def header_twice_the_same_name(folder, rng):
    file, name = some_tensor(folder, rng)
    content, data = read_raw(file)
    text = json.dumps(content)[:-1] + f", {json.dumps(name)}: {json.dumps(content[name])}}}"
    write_raw(file, text.encode(), data)
    return name


@damage()
def header_length_huge(folder, rng):
    file = rng.choice(shards(folder))
    file.write_bytes(struct.pack("<Q", 2**63 - 1) + file.read_bytes()[8:])
    return file.name


@damage(
    short=(lambda blob, rng: blob[: rng.randrange(8, len(blob))],),
    none=lambda blob, rng: b"",
    seven=lambda blob, rng: blob[:7],
    long=lambda blob, rng: blob + b"more",
)
def shard(folder, rng, change):
    file = rng.choice(shards(folder))
    file.write_bytes(change(file.read_bytes(), rng))
    return file.name


@damage()
def shard_missing(folder, rng):
    file = rng.choice(shards(folder))
    file.unlink()
    return file.name


# -- the index


def split(folder):
    """A checkpoint of one file as one of two, with an index, unless it has one."""
    if (folder / INDEX).exists():
        return
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / SINGLE).unlink()
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


@damage(
    list="[]",
    number="5",
    text='"x"',
    not_json="{nonsense",
    empty="",
    empty_object="{}",
    map_empty='{"weight_map": {}}',
    map_list='{"weight_map": []}',
    map_null='{"weight_map": null}',
    deep=(nested(),),
)
def index(folder, rng, text):
    split(folder)
    (folder / INDEX).write_text(text)
    return INDEX


@damage(
    number=7,
    null=None,
    list=["model.safetensors"],
    object={},
    outside="../x.safetensors",
    absolute="/etc/passwd",
    empty="",
    dots="..",
    config="config.json",
    lost="model-09999-of-09999.safetensors",
    nul="a\0b.safetensors",
    surrogate="\ud800.safetensors",
    long="a" * 300 + ".safetensors",
    pickle="pytorch_model.bin",
)
def index_entry(folder, rng, value):
    split(folder)
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"][rng.choice(sorted(content["weight_map"]))] = value
    (folder / INDEX).write_text(json.dumps(content))
    return ""


@damage()
def index_names_more(folder, rng):
    """A tensor that no shard holds."""
    split(folder)
    file = shards(folder)[0].name
    edit_json(folder, INDEX, lambda index: index["weight_map"].update({"lost.weight": file}))
    return "lost.weight"


@damage()
def index_names_less(folder, rng):
    split(folder)
    _, name = some_tensor(folder, rng)
    drop_from_index(folder, name)
    return name


@damage()
def tensor_in_two_shards(folder, rng):
    split(folder)
    file, name = some_tensor(folder, rng)
    other = rng.choice([shard for shard in shards(folder) if shard != file])
    value = load_file(file)[name]
    edit_tensors(folder, other, lambda tensors: tensors.update({name: value + 1}))
    return name


# -- config.json


@damage(
    missing=None,
    empty="",
    not_json="{nonsense",
    list="[]",
    null="null",
    deep=(nested(),),
    deep_list="[" * DEEP + "]" * DEEP,
    empty_object="{}",
    huge_integer='{"vocab_size": ' + "9" * 5000 + "}",
)
def config(folder, rng, text):
    if text is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(text)
    return "config.json"


@damage(config="config.json", tokenizer=TOKENIZER, index=INDEX)
def not_utf8(folder, rng, name):
    if name == INDEX:
        split(folder)
    (folder / name).write_bytes(b'{"a": "\xff\xfe"}')
    return name


@damage(config="config.json", tokenizer=TOKENIZER, index=INDEX)
def too_large(folder, rng, name):
    """A sparse file of 64 GB."""
    if name == INDEX:
        split(folder)
    os.truncate(folder / name, 64 * 10**9)
    return name


@damage()
def config_deep_inside(folder, rng):
    """An ordinary config with one value nested too deep to walk through."""
    text = (folder / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(f'{text}, "extra": {nested(900)}}}')
    return "config.json"


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "head_dim",
)


@damage(
    zero=0,
    negative=-2,
    text="2",
    fraction=2.5,
    null=None,
    list=[2],
    truth=True,
    other=3,
    huge=10**9,
    wider=10**12,
    infinite=(float("inf"),),
)
def size(folder, rng, value):
    key = rng.choice(SIZES)
    edit_json(folder, "config.json", lambda config: config.update({key: value}))
    return key


@damage(
    **{
        f"{key}_{case}": (key, value)
        for key, values in {
            "num_hidden_layers": {"huge": 10**9, "more": 5, "less": 1, "zero": 0, "text": "2"},
            "hidden_size": {"huge": 10**12, "zero": 0, "negative": -64},
            "vocab_size": {"huge": 10**12, "less": 50, "zero": 0},
            "intermediate_size": {"huge": 10**12, "less": 32},
            "num_attention_heads": {"zero": 0, "three": 3, "huge": 10**9},
            "num_key_value_heads": {"zero": 0, "three": 3},
            "max_position_embeddings": {"negative": -1, "text": "many", "huge": 10**15},
            "rms_norm_eps": {
                "nan": float("nan"),
                "inf": float("inf"),
                "text": "small",
                "null": None,
            },
            "rope_parameters": {
                "number": 7,
                "text": "fast",
                "nan": {"rope_theta": float("nan"), "rope_type": "default"},
                "type": {"rope_type": "nonsense"},
            },
            "hidden_act": {"unknown": "nonsense", "number": 3},
            "attention_bias": {"true": True},
            "tie_word_embeddings": {"text": "perhaps"},
            "model_type": {"unknown": "nonsense", "number": 7, "null": None, "other": "gpt2"},
            "architectures": {
                "unknown": ["Nonsense"],
                "number": 7,
                "text": "LlamaForCausalLM",
                "nulls": [None],
                "function": ["pipeline"],
                "config": ["LlamaConfig"],
            },
            "dtype": {"unknown": "nonsense", "function": "load", "number": 16},
            "auto_map": {"object": {"AutoModel": "evil.Model"}, "text": "evil", "number": 7},
            "eos_token_id": {"text": "end", "object": {}, "nested": [[1]]},
            "attention_dropout": {"seven": 7},
            "layer_types": {
                "text": "full",
                "unknown": ["nonsense"] * 3,
                "less": ["full_attention"],
            },
            "transformers_version": {"number": 5},
            "is_encoder_decoder": {"true": True},
            "text_config": {"number": 7},
        }.items()
        for case, value in values.items()
    }
)
def key(folder, rng, name, value):
    edit_json(folder, "config.json", lambda config: config.update({name: value}))
    return name


# -- quantization_config


def quantization(folder, change):
    edit_json(folder, "config.json", lambda config: change(config["quantization_config"]))


@damage(PACKED)
def quantization_deleted(folder, rng):
    edit_json(folder, "config.json", lambda config: config.pop("quantization_config"))
    return ""


@damage(
    PACKED,
    unknown="nonsense",
    false=False,
    number=7,
    list=["gptq"],
    bitsandbytes="bitsandbytes",
    gptq="gptq",
    awq="awq",
    fp8="fp8",
)
def quant_method(folder, rng, value):
    def change(config):
        config["quant_method"] = value
        config.update(bits=4, group_size=32, sym=True, zero_point=True, version="gemm")

    quantization(folder, change)
    return ""


@damage(PACKED, list=[], text="gptq", number=4, empty={}, filled_list=[1])
def quantization_config(folder, rng, value):
    edit_json(folder, "config.json", lambda config: config.update(quantization_config=value))
    return "quantization_config"


@damage(
    PACKED,
    **{
        f"{key}_{case}": (key, value)
        for key, values in {
            "num_bits": {
                "zero": 0,
                "negative": -1,
                "fraction": 3.5,
                "text": "4",
                "null": None,
                "huge": 10**9,
                "other": 8,
                "truth": True,
            },
            "group_size": {
                "zero": 0,
                "negative": -3,
                "text": "32",
                "huge": 10**12,
                "other": 16,
                "fraction": 32.0,
            },
            "symmetric": {"text": "yes"},
            "strategy": {"unknown": "nonsense", "list": ["group"]},
            "type": {"float": "float", "list": ["int"]},
            "actorder": {"list": ["group"], "group": "group"},
        }.items()
        for case, value in values.items()
    },
)
def weights(folder, rng, name, value):
    quantization(
        folder, lambda config: config["config_groups"]["group_0"]["weights"].update({name: value})
    )
    return ""


@damage(
    PACKED,
    **{
        f"{key}_{case}": (key, value)
        for key, values in {
            "config_groups": {"list": [], "empty": {}, "number": {"group_0": 7}},
            "ignore": {
                "number": 7,
                "objects": [{}],
                "all": ["re:.*"],
                "regex": ["re:("],
                "slow": ["re:(a+)+$"],
            },
            "format": {"unknown": "nonsense"},
            "sparsity_config": {"list": [1]},
            "transform_config": {"number": 7},
        }.items()
        for case, value in values.items()
    },
)
def groups(folder, rng, name, value):
    quantization(folder, lambda config: config.update({name: value}))
    return ""


# -- tensors


@damage()
def tensor_deleted(folder, rng):
    file, name = some_tensor(folder, rng)
    edit_tensors(folder, file, lambda tensors: tensors.pop(name))
    drop_from_index(folder, name)
    return name


@damage()
def tensor_renamed(folder, rng):
    file, name = some_tensor(folder, rng)
    edit_tensors(folder, file, lambda tensors: tensors.update({name + "s": tensors.pop(name)}))
    drop_from_index(folder, name)
    if (folder / INDEX).exists():
        edit_json(folder, INDEX, lambda i: i["weight_map"].update({name + "s": file.name}))
    return name


@damage(
    module="model.layers.0.mlp.extra_proj.weight",
    block="model.layers.77.mlp.up_proj.weight",
    part="model.layers.0.mlp.up_proj.weight_extra",
    bias="model.layers.0.mlp.up_proj.bias",
    outside="nonsense",
)
def tensor_added(folder, rng, name):
    file = shards(folder)[0]
    edit_tensors(folder, file, lambda tensors: tensors.update({name: torch.ones(64)}))
    if (folder / INDEX).exists():
        edit_json(folder, INDEX, lambda i: i["weight_map"].update({name: file.name}))
    return name


@damage(
    flat=(lambda t: t.flatten()[:-1].clone(),),
    wide=(lambda t: torch.cat([t, t], -1),),
    more=(lambda t: t[None].clone(),),
    turned=(lambda t: t.flatten().clone(),),
    none=(lambda t: t.flatten()[:0].clone(),),
)
def tensor_reshaped(folder, rng, change):
    file, name = some_tensor(folder, rng, "proj")
    edit_tensors(folder, file, lambda tensors: tensors.update({name: change(tensors[name])}))
    return name


@damage(nan=(float("nan"),), inf=(float("inf"),))
def number(folder, rng, value):
    """Of a dense tensor."""
    file, name = some_tensor(folder, rng, "norm.weight")
    edit_tensors(folder, file, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    return name


@damage(PACKED, nan=(float("nan"),), inf=(float("inf"),), minus_inf=(float("-inf"),))
def scale(folder, rng, value):
    file, name = some_tensor(folder, rng, "weight_scale")
    edit_tensors(folder, file, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    return name


@damage(
    PACKED,
    weight_shape=("weight_shape", lambda t: t + 32),
    huge=("weight_shape", lambda t: t * 2**40),
    minus=("weight_shape", lambda t: -t),
    words=("weight_packed", lambda t: t.long()),
    scales=("weight_scale", lambda t: t.double()),
    halves=("weight_packed", lambda t: t.half()),
)
def packed_part(folder, rng, part, change):
    file, name = some_tensor(folder, rng, part)
    edit_tensors(folder, file, lambda tensors: tensors.update({name: change(tensors[name])}))
    return name


# -- what is no file


@damage(
    **{
        f"{kind}_{name.partition('.')[0]}": (name, kind)
        for kind in ("fifo", "directory", "device", "dangling", "loop", "socket")
        for name in ("config.json", "weights", TOKENIZER)
    },
    fifo_index=(INDEX, "fifo"),
    fifo_generation=("generation_config.json", "fifo"),
    fifo_tokenizer_config=("tokenizer_config.json", "fifo"),
    fifo_template=("chat_template.jinja", "fifo"),
    fifo_adapter=("adapter_config.json", "fifo"),
)
def irregular(folder, rng, name, kind):
    if name == INDEX:
        split(folder)
    if name == "weights":
        name = rng.choice(shards(folder)).name
    return replace_file(folder, name, kind)


@damage(alone=True, beside=False)
def pickles(folder, rng, alone):
    """Beside safetensors they are no harm: nobody reads them."""
    file = folder / "pytorch_model.bin"
    torch.save({"model.norm.weight": torch.ones(64)}, file)
    if alone:
        for path in (*shards(folder), folder / INDEX):
            path.unlink(missing_ok=True)
    return file.name


@damage()
def adapter(folder, rng):
    content = {"peft_type": "LORA", "base_model_name_or_path": "nowhere/model", "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    save_file({"x": torch.ones(2)}, folder / "adapter_model.safetensors")
    return "adapter_config.json"


@damage(
    lonely=None,
    broken="{nonsense",
    deep=(nested(),),
    list="[]",
    number="7",
    eos='{"eos_token_id": {"a": 1}}',
    ends='{"eos_token_id": [[1]]}',
    nan='{"temperature": NaN, "do_sample": true}',
)
def generation(folder, rng, text):
    if text is not None:
        (folder / "generation_config.json").write_text(text)
        return "generation_config.json"
    (folder / "generation_config.json").unlink(missing_ok=True)
    return ""


# -- the tokenizer


@damage()
def tokenizer_missing(folder, rng):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return "tokenizer"


@damage(
    empty="",
    not_json="{nonsense",
    list="[]",
    empty_object="{}",
    deep=(nested(),),
    model='{"version": "1.0", "model": {"type": "Nonsense"}}',
    vocab='{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": 7}}',
    id_huge='{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 4294967295}}}',
    added=(
        '{"version": "1.0", "added_tokens": [{"id": -1, "content": 7}], '
        '"model": {"type": "WordLevel", "vocab": {}, "unk_token": "u"}}',
    ),
)
def tokenizer(folder, rng, text):
    (folder / TOKENIZER).write_text(text)
    return "tokenizer"


@damage(
    list="[]",
    not_json="{",
    deep=(nested(),),
    name='{"tokenizer_class": "Nonsense"}',
    number='{"tokenizer_class": 7}',
    code='{"auto_map": {"AutoTokenizer": ["evil.T", null]}}',
    length='{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": "long"}',
    special='{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"a": 7}}',
    gguf='{"tokenizer_class": "PreTrainedTokenizerFast", "tokenizer_file": "/etc/passwd"}',
)
def tokenizer_config(folder, rng, text):
    (folder / "tokenizer_config.json").write_text(text)
    return ""


@damage()
def tokenizer_of_another_model(folder, rng):
    """Tokens that the embedding does not have: an index error, later, in the middle of a text."""

    def change(content):
        vocabulary = content["model"]["vocab"]
        content["model"]["vocab"] = {token: 10 * i + 1000 for token, i in vocabulary.items()}
        content["added_tokens"] = []

    edit_json(folder, TOKENIZER, change)
    return "tokenizer"


@damage(header=b"nonsense", none=b"")
def kv_file(folder, rng, blob):
    """What `quantize --kv kv4` stores beside the weights."""
    (folder / "billfish_kv.safetensors").write_bytes(blob)
    return "billfish_kv.safetensors"


# -- dice


@damage(CHANCE)
def bytes_flipped(folder, rng):
    file = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    blob = bytearray(file.read_bytes() or b"\0")
    for _ in range(rng.randint(1, 8)):
        blob[rng.randrange(min(len(blob), 4096))] ^= 1 << rng.randrange(8)
    file.write_bytes(blob)
    return ""


@damage(CHANCE)
def file_cut(folder, rng):
    file = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    os.truncate(file, rng.randrange(file.stat().st_size + 1))
    return ""


@damage(CHANCE)
def file_swapped(folder, rng):
    """One file under the name of another."""
    first, second = rng.sample(sorted(path for path in folder.iterdir() if path.is_file()), 2)
    first.write_bytes(second.read_bytes())
    return ""


@damage(CHANCE)
def file_lost(folder, rng):
    rng.choice(sorted(path for path in folder.iterdir() if path.is_file())).unlink()
    return ""


ODD = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    7,
    64,
    2**31,
    2**63,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../..",
    "\0",
    [],
    {},
    [[]],
    {"a": {}},
    ["x"] * 3,
    "F32",
    [0, 0],
    [-1, 1],
]


@damage(
    CHANCE,
    config="config.json",
    index=INDEX,
    tokenizer=TOKENIZER,
    tokenizer_config="tokenizer_config.json",
    generation="generation_config.json",
)
def json_value(folder, rng, name):
    """Any value of a JSON file replaced by an odd one, removed, or doubled in a list."""
    if name == INDEX:
        split(folder)
    if not (folder / name).exists():
        return ""
    content = json.loads((folder / name).read_text())
    _change_one(content, rng)
    (folder / name).write_text(json.dumps(content))
    return ""


@damage(CHANCE)
def json_value_of_a_header(folder, rng):
    file = rng.choice(shards(folder))
    content, data = read_raw(file)
    _change_one(content, rng)
    write_raw(file, content, data)
    return ""


def _change_one(content, rng):
    places = []

    def walk(value):
        keys = value if isinstance(value, dict) else range(len(value))
        for k in keys:
            places.append((value, k))
            if isinstance(value[k], dict | list):
                walk(value[k])

    walk(content)
    if not places:
        return
    holder, k = rng.choice(places)
    if rng.random() < 0.2:
        del holder[k]
    else:
        holder[k] = rng.choice(ODD)


def break_it(folder, seed, packed):
    """One damage at random; its name."""
    rng = random.Random(seed)
    name = rng.choice([name for name in DAMAGES if packed or name not in PACKED])
    DAMAGES[name](folder, rng)
    return name
