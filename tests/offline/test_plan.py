"""plan: its sizes are those of the result, byte for byte, and it refuses what the job refuses."""

import json

import pytest
import torch
from tiny_checkpoint import tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM

from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError
from billfish.offline import costs, distill, training_costs
from billfish.offline import plan as planning
from billfish.offline.costs import Linear, input_groups
from billfish.offline.driver import Job, quantize
from billfish.offline.plan import obstacle, plan, tp_axis
from billfish.offline.request import QuantizeRequest
from billfish.offline.task import Task
from billfish.schemes.w4a16 import W4A16
from billfish.solvers import finetune

CASES = {
    "symmetric": (W4A16(4, 32), None),
    "asymmetric": (W4A16(4, 32, symmetric=False), None),
    "3 bit, channel, fp16": (W4A16(3, -1, symmetric=False), torch.float16),
    "8 bit, fp32": (W4A16(8, 64), torch.float32),
}


@pytest.fixture(autouse=True)
def short_probe(monkeypatch):
    monkeypatch.setattr(costs, "PROBE_SECONDS", 0.001)
    monkeypatch.setattr(costs, "PROBES", (32, 64))
    monkeypatch.setattr(costs, "DEPTH", 64)
    monkeypatch.setattr(training_costs, "WEIGHTS", {"cpu": (32, 64)})


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = tmp_path_factory.mktemp("dense") / "model"
    tiny_llama().save_pretrained(path)
    return path


def sizes(path):
    return {name: entry.nbytes for name, entry in Checkpoint(path).entries.items()}


def tp_of(result):
    """{q_proj: [1, 2], ...}: all blocks are alike."""
    return {row["module"].rpartition(".")[2]: row["tp"] for row in result["layers"]}


# -- sizes


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_of_the_result(case, tied, tmp_path):
    tiny_llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "dense")
    scheme, dtype = CASES[case]
    request = QuantizeRequest(
        tmp_path / "dense", tmp_path / "out", scheme, "rtn", stored_dtype=dtype
    )
    planned = plan(request)
    assert not (tmp_path / "out").exists()
    quantize(request)
    before, after = sizes(tmp_path / "dense"), sizes(tmp_path / "out")
    totals = planned["totals"]
    assert (totals["linears"], totals["quantized"], totals["skipped"]) == (15, 14, 1)
    assert totals["bytes_before"] == sum(before.values())
    assert totals["bytes_after"] == sum(after.values())
    expected = {}
    for row in planned["layers"]:
        for part, nbytes in row["stored"].items():
            expected[f"{row['module']}.{part}"] = nbytes
        assert row["bytes_after"] == sum(row["stored"].values())
        assert row["bytes_before"] == before.get(f"{row['module']}.weight", 0)
        if row["skip"] is None:
            assert row["bits_per_weight"] == row["bytes_after"] * 8 / (row["n"] * row["k"])
    if tied:
        assert expected.pop("lm_head.weight") == 0 and "lm_head.weight" not in after
    stored = {n: b for n, b in after.items() if "proj" in n or n == "lm_head.weight"}
    assert expected == stored
    weights = 2 * 64 * (64 + 32 + 32 + 64 + 3 * 128)
    assert totals["quantized_parameters"] == weights
    packed = sum(nbytes for name, nbytes in after.items() if "proj" in name)
    assert totals["bits_per_weight"] == packed * 8 / weights
    source = Checkpoint(tmp_path / "dense").entries.values()
    parameters = sum(torch.Size(entry.shape).numel() for entry in source)
    assert totals["model_bits_per_weight"] == sum(after.values()) * 8 / parameters


def test_layers_the_group_size_does_not_divide_are_skipped(tmp_path):
    tiny_llama(intermediate_size=96).save_pretrained(tmp_path / "dense")
    request = QuantizeRequest(
        tmp_path / "dense", tmp_path / "out", W4A16(4, 64), "rtn", allow_skipped=True
    )
    planned = plan(request)
    quantize(request)
    assert planned["totals"]["bytes_after"] == sum(sizes(tmp_path / "out").values())
    skipped = {row["module"]: row for row in planned["layers"] if row["skip"]}
    down = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert set(skipped) == {*down, "lm_head"}
    row = skipped[down[0]]
    assert "does not divide k = 96" in row["skip"]
    assert (row["scheme"], row["bits_per_weight"], row["bytes_after"]) == (None, 16, 64 * 96 * 2)


# -- tensor parallelism, by hand: hidden 64, intermediate 128, 4 heads of 16, 2 of them key-value


def test_degrees_symmetric(dense, tmp_path):
    found = plan(QuantizeRequest(dense, tmp_path / "out", W4A16(4, 32), "rtn"))
    assert tp_of(found) == {
        "q_proj": [1, 2, 4, 8],  # n = 64
        "k_proj": [1, 2, 4, 8],  # n = 32
        "v_proj": [1, 2, 4, 8],
        "o_proj": [1, 2],  # k = 64: 2 groups
        "gate_proj": [1, 2, 4, 8],  # n = 128
        "up_proj": [1, 2, 4, 8],
        "down_proj": [1, 2, 4],  # k = 128: 4 groups
        "lm_head": [1, 2, 4, 8],
    }
    assert found["tp"]["possible"] == [1, 2]
    assert found["tp"]["impossible"] == {
        "4": "model.layers.0.self_attn.o_proj: 16 inputs are not whole groups of 32.",
        "8": "4 attention heads do not split into 8.",
    }


def test_degrees_asymmetric(dense, tmp_path):
    found = tp_of(
        plan(QuantizeRequest(dense, tmp_path / "out", W4A16(4, 32, symmetric=False), "rtn"))
    )
    assert found["q_proj"] == [1, 2, 4, 8]  # 8 zeros of 4 bits: one word
    assert found["k_proj"] == [1, 2, 4]  # 4 zeros: half a word


def test_degrees_of_odd_bits_per_channel(dense, tmp_path):
    found = tp_of(plan(QuantizeRequest(dense, tmp_path / "out", W4A16(3, -1), "rtn")))
    assert found["o_proj"] == [1, 2]  # 32 codes of 3 bits are 3 words, 16 are not whole
    assert found["down_proj"] == [1, 2, 4]


def test_degrees_of_heads(tmp_path):
    model = tiny_llama(hidden_size=96, num_attention_heads=12, num_key_value_heads=3, head_dim=32)
    model.save_pretrained(tmp_path / "dense")
    found = plan(QuantizeRequest(tmp_path / "dense", tmp_path / "out", W4A16(4, 16), "rtn"))["tp"]
    assert found["possible"] == [1]
    assert "3 key-value heads" in found["impossible"]["2"]
    assert "12 attention heads" in found["impossible"]["8"]


def test_layer_in_no_plan_must_split_both_ways():
    layer = Linear("encoder.fc", 24, 64, None, None)
    degrees = [tp for tp in (1, 2, 4, 8) if obstacle(layer, tp, W4A16(4, 16)) is None]
    assert degrees == [1, 2, 4]  # 64 / 8 = 8: half a group
    dense = Linear("encoder.fc", 24, 64, "skipped", None)
    assert [tp for tp in (1, 2, 4, 8) if obstacle(dense, tp, W4A16(4, 16)) is None] == [1, 2, 4, 8]
    assert obstacle(Linear("x", 12, 64, None, "2n"), 4, W4A16(4, 16)) is not None  # 6 + 6 outputs
    assert obstacle(Linear("x", 7, 7, None, "whole"), 8, W4A16(4, -1)) is None


@pytest.mark.parametrize(
    ("style", "way"),
    [
        ("colwise", "n"),
        ("colwise_rep", "n"),
        ("colwise_gather_output", "n"),
        ("local_colwise", "n"),
        ("packed_colwise", "2n"),
        ("rowwise", "k"),
        ("rowwise_split_input", "k"),
        ("replicated_with_grad_allreduce", "whole"),
        ("sequence_parallel", None),
        ("", None),
    ],
)
def test_names_of_transformers_tp_plans(style, way):
    styles = {"layers.*.mlp.fc": style, "lm_head": "colwise_rep"}
    assert tp_axis("model.layers.17.mlp.fc", styles) == way
    assert tp_axis("layers.3.mlp.fc", styles) == way
    assert tp_axis("model.layers.17.mlp.other_fc", styles) is None


# -- refusals


def test_refuses_what_the_job_refuses(dense, tmp_path):
    with pytest.raises(UserError, match="no linear can be quantized"):
        plan(QuantizeRequest(dense, tmp_path / "out", W4A16(4, 48), "rtn", allow_skipped=True))
    quantize(QuantizeRequest(dense, tmp_path / "done", W4A16(4, 32), "rtn"))
    with pytest.raises(UserError, match="quantize"):
        plan(QuantizeRequest(tmp_path / "done", tmp_path / "out", W4A16(4, 32), "rtn"))
    with pytest.raises(UserError, match="no such directory"):
        plan(QuantizeRequest(tmp_path / "nothing", tmp_path / "out", W4A16(4, 32), "rtn"))


def test_refuses_calibration_that_cannot_be(dense, llama, tmp_path):
    with pytest.raises(UserError, match="tokenizer"):
        plan(QuantizeRequest(dense, tmp_path / "out", W4A16(4, 32), "gptq"))
    with pytest.raises(UserError, match="no such calibration file"):
        plan(QuantizeRequest(llama, tmp_path / "out", W4A16(4, 32), "gptq", data="nothing.txt"))


def test_refuses_a_gpu_that_is_not_there(dense, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="doctor"):
        plan(QuantizeRequest(dense, tmp_path / "out", W4A16(4, 32), "rtn", device="cuda"))


# -- estimates


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "finetune"])
def test_estimates(method, llama, text, tmp_path):
    steps = {"steps": 2, "end_to_end": 2} if method == "finetune" else {}
    request = QuantizeRequest(
        llama, tmp_path / "out", W4A16(4, 32), method, text, nsamples=8, seqlen=64, **steps
    )
    planned = plan(request)
    json.dumps(planned)
    found = planned["estimates"]
    assert "Estimates" in found["note"]
    assert found["seconds"] == pytest.approx(sum(found["time"].values()))
    assert found["disk_bytes"] == sum(found["disk"].values())
    assert found["disk"]["result"] >= planned["totals"]["bytes_after"]
    if method == "rtn":
        assert planned["calibration"] is None and found["memory"]["activations"] == 0
    else:
        report = quantize(request)
        assert planned["calibration"]["tokens"] == report["calibration"]["tokens"]
        width = getattr(torch, planned["dtype"]).itemsize
        states = planned["calibration"]["tokens"] * 64 * width  # hidden size
        assert found["memory"]["activations"] == states * (1 if method == "awq" else 2)
        assert found["time"]["passes"] > 0 and found["time"]["statistics"] > 0
    trained = {"training", "distillation"} if method == "finetune" else set()
    assert {name for name, taken in found["time"].items() if taken > 0} >= trained
    assert trained == found["time"].keys() & {"training", "distillation"}
    most = max(part for name, part in found["memory"].items() if name != "process")
    assert found["memory_bytes"] >= found["memory"]["process"] + most


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
WEIGHTS_8B = 32 * 4096 * (4096 + 1024 + 1024 + 4096 + 3 * 14336)


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory):
    """A checkpoint of its shapes whose file is a hole."""
    path = tmp_path_factory.mktemp("shapes") / "model"
    config = LlamaConfig(**LLAMA_8B, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(path)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    header, end = {}, 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        shape = list(parameter.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        file.truncate(8 + len(words) + end)
    return path


@pytest.fixture
def on_an_h200(llama_8b, monkeypatch):
    """Estimates of a request for the 8B model with the rates of an H200: 600 TFLOP/s in bf16, 50 in
    fp32, 4 TB/s, 90 bytes a weight and step of training."""
    monkeypatch.setattr(costs, "measure", lambda task: costs.Rates(50e12, 50e12, 2e-10, 3e-6))
    rates = training_costs.TrainingRates(600e12, 1 / 4e12, 90 / 4e12)
    monkeypatch.setattr(costs, "measure_training", lambda *given: rates)

    def estimates(**options):
        task = Task(QuantizeRequest(llama_8b, None, W4A16(4, 128), **options), Checkpoint(llama_8b))
        task.device, task.dtype = torch.device("cuda"), torch.float32
        tokens = task.request.nsamples * task.request.seqlen
        return costs.estimate(task, planning.find_linears(task), tokens, 5 * 10**9)

    return estimates


def test_time_of_finetuning_8b(on_an_h200):
    """No less than its products take, and below 90 minutes."""
    found, plain = on_an_h200(method="finetune"), on_an_h200(method="gptq")
    products = 6 * finetune.TOKENS * WEIGHTS_8B / 600e12
    logits = 8 * distill.TOKENS * (WEIGHTS_8B + 128256 * 4096) / 600e12
    assert products * finetune.STEPS < found["time"]["training"] < 3 * products * finetune.STEPS
    assert logits < found["time"]["distillation"] / finetune.END_TO_END < 3 * logits
    assert plain["seconds"] < found["seconds"] < 90 * 60
    twice = on_an_h200(method="finetune", steps=2 * finetune.STEPS, end_to_end=0)["time"]
    assert twice["training"] == pytest.approx(2 * found["time"]["training"])
    assert twice["distillation"] == 0


def test_memory_of_finetuning_8b(on_an_h200):
    """A block of 218 million weights in training; then the codes of all, a byte each. What is
    estimated for 192 sequences is in docs/LOG.md."""
    found, block = on_an_h200(method="finetune", nsamples=192), WEIGHTS_8B / 32
    assert 17 * block < found["memory"]["training"] < 40 * block  # positions, moments, gradients
    codes, scales, embeddings = WEIGHTS_8B, 20 * WEIGHTS_8B / 128, 2 * 128256 * 4096 * 4
    least = codes + scales + embeddings
    assert least < found["memory"]["distillation"] < 2 * least
    assert 24e9 < found["memory_bytes"] < 27e9
    alone = on_an_h200(method="finetune", nsamples=192, end_to_end=0)
    assert alone["memory"]["distillation"] == 0
    few = on_an_h200(method="finetune", nsamples=32)
    states = 2 * (192 - 32) * 1024 * 4096 * 4  # quantized and original
    assert found["memory"]["activations"] - few["memory"]["activations"] == states
    assert few["memory"]["distillation"] == found["memory"]["distillation"]


def test_linears_that_read_one_input():
    ways = {"q": "n", "k": "n", "v": "n", "o": "k"}
    linears = [Linear(f"h.0.attn.{name}", 8, 16, None, way) for name, way in ways.items()]
    linears += [Linear("h.0.mlp.up", 32, 16, None, "n"), Linear("h.1.mlp.up", 32, 16, None, "n")]
    groups = sorted(input_groups(linears, "h.0."))
    assert groups == [(8, 16, 1.0), (24, 16, 1.0), (32, 16, 1.0)]


def test_warnings(dense, tmp_path, monkeypatch):
    output = tmp_path / "out"
    request = QuantizeRequest(dense, output, W4A16(4, 32), "rtn")
    assert plan(request)["warnings"] == []
    output.mkdir()
    (output / "mine.txt").write_text("")
    assert "not empty" in plan(request)["warnings"][0]
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   1000 kB\n")
    monkeypatch.setattr(planning, "MEMORY", tmp_path / "meminfo")
    assert "memory" in plan(request)["warnings"][1]


def test_unfinished_job(dense, tmp_path):
    request = QuantizeRequest(dense, tmp_path / "out", W4A16(4, 32), "rtn")
    Job(Task(request, Checkpoint(dense)), request.output).open(True)
    assert "unfinished job" in plan(request)["warnings"][0]
    with pytest.raises(UserError, match="another way"):
        plan(QuantizeRequest(dense, tmp_path / "out", W4A16(4, 64), "rtn"))
