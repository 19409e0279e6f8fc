"""`billfish bench generate` on tiny models and a CPU: what is measured, written, drawn, refused."""

import gc
import json
import weakref

import pytest
import torch
from ahead import Ahead
from test_cli_bench import png_size
from tiny import GROUPED, write_checkpoint
from torch import nn
from typer.testing import CliRunner

from billfish.bench import generate, plot_generate, random_model, variants
from billfish.bench.generate import GenerateBench
from billfish.bench.variants import GenerateRequest, parse_batches, parse_bytes, parse_variants
from billfish.cli import bench as cli_bench
from billfish.engine import build
from billfish.engine.llm import LLM
from billfish.engine.sampling import SamplingParams
from billfish.errors import UserError
from billfish.models.linear import QuantLinear
from billfish.schemes.w4a16 import W4A16

CPU = torch.device("cpu")
SCHEME = W4A16(group_size=32)
SHORT = ("--input", "6", "--output", "5", "--rounds", "2", "--group-size", "32")
FIGURES = {
    "batch",
    "error",
    "rounds",
    "peak_bytes",
    "seconds",
    "tokens_per_s",
    "prefill_seconds",
    "step_seconds",
    "decode_tokens_per_s",
    "steps",
    "decode_steps",
    "kv_read_bytes",
    "floor_seconds",
    "roofline",
    "roofline_with_kv",
    "decode_tokens_per_s_ratio",
    "tokens_per_s_ratio",
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def config(tmp_path):
    told = {"model_type": "llama", **GROUPED, "num_hidden_layers": 2, "rope_theta": 5e5}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(told))
    return path


def request(config, text="bf16+kv16", **changes):
    asked = {"batches": (1, 3), "input": 6, "output": 5, "rounds": 2, "group_size": 32}
    return GenerateRequest(str(config), True, parse_variants(text), **{**asked, **changes})


def made(config, dtype=torch.bfloat16, scheme=None):
    model = random_model.empty_model(random_model.config_of(str(config)), dtype)
    planned = random_model.planned_bytes(model, scheme)
    random_model.fill(model, scheme, CPU)
    return model, planned


def invoke(*args):
    return CliRunner().invoke(cli_bench.app, ["generate", *map(str, args)])


def refusal(*args):
    done = invoke(*args)
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)


# -- random models


@pytest.mark.parametrize("scheme", [None, SCHEME])
def test_a_random_model_is_whole_finite_and_as_large_as_planned(config, scheme):
    model, planned = made(config, scheme=scheme)
    assert not [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    assert not [name for name, tensor in model.named_buffers() if tensor.is_meta]
    packed = [name for name, m in model.named_modules() if isinstance(m, QuantLinear)]
    assert len(packed) == (14 if scheme else 0) and type(model.lm_head) is nn.Linear
    logits = model(torch.arange(9)[None]).logits
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all() and logits.std() > 0.01
    assert random_model.held_bytes(model) == pytest.approx(planned, rel=0.2)
    embedding = model.model.embed_tokens.weight.nbytes
    norms = sum(p.nbytes for p in model.parameters() if p.ndim == 1)
    read = random_model.read_bytes(model)
    assert read + embedding + norms == random_model.held_bytes(model)


def test_a_tied_head_is_one_tensor_that_is_read(tmp_path, config):
    told = json.loads(config.read_text()) | {"tie_word_embeddings": True}
    config.write_text(json.dumps(told))
    model, planned = made(config, torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert random_model.held_bytes(model) == planned
    assert random_model.read_bytes(model) > model.lm_head.weight.nbytes


def test_frequencies_are_those_of_a_model_built_in_memory(config):
    model, _ = made(config)
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    torch.testing.assert_close(rotary.inv_freq, 5e5 ** -(torch.arange(0, 16, 2) / 16))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2-7b", 6.74),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
        ("mistral-7b", 7.25),
        ("qwen2.5-7b", 7.62),
        ("qwen3-8b", 8.19),
        ("smollm2-135m", 0.1345),
    ],
)
def test_named_models_have_the_size_they_are_known_for(name, billions):
    model = random_model.empty_model(random_model.config_of(name), torch.float16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_llm_of_runs_a_model_without_a_tokenizer(config):
    model, _ = made(config)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM.of(model, random_model.Silent(), max_num_seqs=2) as llm:
        outputs = llm.generate([[1, 2, 3], [4]], params)
        with pytest.raises(UserError, match="list of token ids"):
            llm.generate("text", params)
        with pytest.raises(UserError, match="no chat template"):
            llm.chat([])
    assert [len(one.outputs[0].token_ids) for one in outputs] == [4, 4]
    assert [one.outputs[0].text for one in outputs] == ["", ""]
    with pytest.raises(UserError, match=r"LLM\.of with dtype"):
        LLM.of(model, random_model.Silent(), dtype="bfloat16")


# -- measuring


def test_every_variant_and_batch_is_measured_and_compared(config):
    kept = []
    named = "fp32+kv16,bf16+kv8,w4a16+kv4"
    asked = request(config, named, bandwidth=1e10, dtype="bfloat16")
    result = GenerateBench(asked, CPU, keep=lambda told: kept.append(json.dumps(told))).measure()
    assert result["complete"] and len(kept) >= 6 and not json.loads(kept[0])["complete"]
    assert "commit" not in result and result["settings"]["batches"] == (1, 3)
    for variant in result["variants"]:
        assert variant["error"] is None and [p["batch"] for p in variant["points"]] == [1, 3]
        for point in variant["points"]:
            assert set(point) == FIGURES and len(point["rounds"]) == 2
            assert point["steps"] == 5 and point["decode_steps"] == 4
            assert point["seconds"] > point["prefill_seconds"] > 0
            assert point["decode_tokens_per_s"] == point["batch"] / point["step_seconds"]
            assert point["floor_seconds"] == variant["read_bytes"] / 1e10
            share = point["floor_seconds"] / point["step_seconds"]
            assert point["roofline"] == share < point["roofline_with_kv"]
        assert variant["best"]["batch"] in (1, 3)
    first, _, packed = result["variants"]
    assert first["points"][1]["tokens_per_s_ratio"] == 1 == first["best"]["ratio"]
    assert packed["dtype"] == "bfloat16" and packed["read_bytes"] < first["read_bytes"] / 3
    assert packed["kv_bytes_a_token"] < first["kv_bytes_a_token"] / 4


def test_a_model_is_gone_before_the_next_is_made(config, monkeypatch):
    alive = []
    fill = random_model.fill

    def watched(model, *args):
        gc.collect()
        assert not [reference for reference in alive if reference() is not None]
        alive.append(weakref.ref(model))
        fill(model, *args)

    monkeypatch.setattr(random_model, "fill", watched)
    GenerateBench(request(config, "fp32+kv16,bf16+kv16,w4a16+kv16", batches=(1,)), CPU).measure()
    assert len(alive) == 3


def test_auto_takes_as_many_sequences_as_memory_holds(config):
    model, _ = made(config)
    token = 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, head_dim, bytes; pages are of 16 tokens
    memory = random_model.held_bytes(model) + 3 * 16 * token + 100
    asked = request(config, batches=(2, None, 7), memory=memory)
    (variant,) = GenerateBench(asked, CPU).measure()["variants"]
    assert variant["largest_batch"] == 3
    assert [(p["batch"], bool(p["error"])) for p in variant["points"]] == [
        (2, False),
        (3, False),
        (7, True),
    ]
    assert "7 sequences: 3 fit" in variant["points"][2]["error"]
    asked = request(config, batches=(None,), max_batched_tokens=5)
    (variant,) = GenerateBench(asked, CPU).measure()["variants"]
    assert variant["largest_batch"] == 5  # every running text has a token in each step


def test_decoding_is_not_timed_where_texts_end_before_the_last_begins(config):
    asked = request(config, batches=(4,), output=2, max_batched_tokens=6)
    (variant,) = GenerateBench(asked, CPU).measure()["variants"]
    (point,) = variant["points"]
    assert point["decode_steps"] == 0 and point["step_seconds"] is None
    assert point["tokens_per_s"] > 0 and point["roofline"] is None
    assert point["decode_tokens_per_s_ratio"] is None


def test_tokens_are_counted_when_drawn_not_when_told(config, monkeypatch):
    """A GPU's steps give back the text of the step before."""
    inner = build.TorchRunner
    monkeypatch.setattr(build, "TorchRunner", lambda *given: Ahead(inner(*given)))
    (variant,) = GenerateBench(request(config), CPU).measure()["variants"]
    assert [(p["steps"], p["decode_steps"]) for p in variant["points"]] == [(6, 4), (6, 4)]


def test_what_does_not_fit_is_told_and_the_rest_is_measured(config):
    model, _ = made(config, scheme=SCHEME)
    memory = random_model.held_bytes(model) + 9000
    asked = request(config, "fp32+kv16,w4a16+kv4", memory=memory, dtype="bfloat16")
    dense, packed = GenerateBench(asked, CPU).measure()["variants"]
    assert "weights take" in dense["error"] and "Raise --memory" in dense["error"]
    assert not dense["points"] and dense["best"] is None
    assert packed["points"][0]["error"] is None and packed["best"]["ratio"] is None
    with pytest.raises(UserError, match=r"nothing could be measured.*Raise --memory.*kv4"):
        GenerateBench(request(config, "fp32+kv16,w4a16+kv4", memory=2000), CPU).measure()


def test_a_step_that_fails_ends_its_point_alone(config, monkeypatch):
    real = generate.LLM.generate

    def sometimes(llm, prompts, params):
        outputs = real(llm, prompts, params)
        if len(prompts) == 3:
            outputs[1].outputs[0].error = "OutOfMemoryError: too much"
        return outputs

    monkeypatch.setattr(generate.LLM, "generate", sometimes)
    (variant,) = GenerateBench(request(config), CPU).measure()["variants"]
    assert [p["error"] for p in variant["points"]] == [None, "OutOfMemoryError: too much"]


# -- the command


def test_a_run_is_shown_written_and_drawn(config, tmp_path):
    written, picture = tmp_path / "g.json", tmp_path / "g.png"
    done = invoke(
        "--config",
        config,
        *SHORT,
        "--batch",
        "1,2,900",
        "--variants",
        "bf16+kv16,w4a16+kv4",
        "--memory",
        "3MB",
        "--bandwidth",
        "0.01",
        "--save",
        written,
        "--plot",
        picture,
    )
    assert done.exit_code == 0, done.output
    for told in ("random weights", "6 tokens in, 5 out", "w4a16+kv4", "900 sequences", "x first"):
        assert told in done.output
    assert png_size(picture)[0] > 1200
    kept = json.loads(written.read_text())
    assert kept["complete"] and kept["bench"] == "generate" and kept["result_version"] == 1
    picture.unlink()
    printed = invoke("--from", written, "--json")
    assert printed.exit_code == 0 and json.loads(printed.stdout) == kept
    again = invoke("--from", written, "--plot", picture)
    assert again.exit_code == 0 and again.output.startswith("device") and picture.exists()
    assert "no result of bench generate" in refusal("--from", write(tmp_path, {}))
    assert "drop it" in refusal("--from", written, "--config", "llama3-8b")
    kernels = CliRunner().invoke(cli_bench.app, ["kernels", "--from", str(written)])
    assert "no result of bench kernels" in str(kernels.exception)


def test_energy_is_that_of_all_measured_rounds(config, monkeypatch, tmp_path):
    """A card that uses 100 W, by a counter that is read after the warm-up and at the end."""
    read = []

    def joules(device):
        read.append(generate.time.perf_counter())
        return 100 * read[-1]

    monkeypatch.setattr(generate.nvml, "joules", joules)
    asked = request(config, energy=True, price=0.36)
    result = GenerateBench(asked, CPU).measure()
    assert len(read) == 1 + 2 * 2
    for point in result["variants"][0]["points"]:
        used, tokens = point["energy"], point["batch"] * 5 * 2
        assert 100 <= used["watts"] < 150
        seconds = sum(told["seconds"] for told in point["rounds"])
        assert used["joules_per_token"] == pytest.approx(used["watts"] * seconds / tokens)
        assert used["cost_per_million_tokens"] == pytest.approx(used["joules_per_token"] / 10)
    shown = invoke("--from", write(tmp_path, result)).output
    assert "J per token" in shown and "cost of a million tokens" in shown


def test_energy_needs_a_counter_and_a_price_needs_energy(config):
    with pytest.raises(UserError, match=r"no energy counter of CPU.*or leave it out"):
        GenerateBench(request(config, energy=True), CPU)
    with pytest.raises(UserError, match=r"--price 0.3: .*with --energy"):
        request(config, price=0.3)


def write(folder, content):
    path = folder / "other.json"
    path.write_text(json.dumps(content))
    return path


def test_a_checkpoint_runs_with_what_it_holds(tmp_path):
    path = write_checkpoint(tmp_path / "llama")
    done = invoke(path, *SHORT, "--batch", "2", "--variants", "stored+kv16,stored+kv4")
    assert done.exit_code == 0 and "stored+kv4" in done.output, done.output
    done = invoke(path, *SHORT, "--batch", "2", "--random", "--variants", "w4a16+kv16")
    assert done.exit_code == 0 and "random weights" in done.output, done.output


def test_pictures_are_lines_or_bars(config):
    result = GenerateBench(request(config, "bf16+kv16,w4a16+kv16", bandwidth=1e10), CPU).measure()
    decode, both = plot_generate.generate_figure(result).axes
    assert len(decode.get_lines()) == 4 and len(both.get_lines()) == 2  # with roofs, and without
    for variant in result["variants"]:
        del variant["points"][1:]
    assert [len(axes.patches) for axes in plot_generate.generate_figure(result).axes] == [2, 2]
    result["variants"][0]["points"] = []
    assert [len(axes.patches) for axes in plot_generate.generate_figure(result).axes] == [1, 1]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "say what is measured"),
        (["here", "--config", "llama3-8b"], "say what is measured"),
        (["--config", "gpt5"], "llama3-70b"),
        (["nowhere"], "no such directory"),
        (["--config", "llama3-8b", "--variants", "w3+kv16"], "is weights+cache"),
        (["--config", "llama3-8b", "--variants", "w4a16"], "cache: kv16, kv8, kv4"),
        (["--config", "llama3-8b", "--variants", ","], "none given"),
        (["--config", "llama3-8b", "--variants", "stored+kv16"], "no stored weights"),
        (["here", "--variants", "w4a16+kv16"], "stored+kv16"),
        (["--config", "llama3-8b", "--batch", "0"], "numbers from 1"),
        (["--config", "llama3-8b", "--batch", "-3"], "numbers from 1"),
        (["--config", "llama3-8b", "--batch", ""], "none given"),
        (["--config", "llama3-8b", "--input", "0"], "give 1 or more"),
        (["--config", "llama3-8b", "--output", "1"], "give 2 or more"),
        (["--config", "llama3-8b", "--input", "8000", "--output", "400"], "made for 8192"),
        (["--config", "llama3-8b", "--memory", "lots"], "80GB"),
        (["--config", "llama3-8b", "--memory", "900TB"], "Give less"),
        (["--config", "llama3-8b", "--memory", "1GB"], "Raise --memory"),
        (["--config", "llama3-8b", "--bandwidth", "0"], "above 0"),
        (["--config", "smollm2-135m"], "group size 128 does not divide k = 576"),
        (["--config", "llama3-8b", "--group-size", "0"], "1 or more"),
        (["--config", "llama3-8b", "--device", "cuda"], "billfish doctor"),
        (["--config", "llama3-8b", "--device", "tpu"], "known are auto"),
        (["--config", "llama3-8b", "--save", "no/such/place.json"], "there is no directory"),
        (["--config", "llama3-8b", "--plot", "no/such/place.png"], "--plot"),
    ],
)
def test_refusals_say_what_is_wrong(tmp_path, monkeypatch, args, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(random_model, "fill", lambda *args: pytest.fail("filled in vain"))
    assert told in refusal(*args)


def test_a_config_of_something_else_is_refused(tmp_path):
    path = write(tmp_path, {"model_type": "perceptron"})
    assert "model_type 'perceptron'" in refusal("--config", path)
    path.write_text("no json")
    assert "not valid JSON" in refusal("--config", path)


def test_words_are_read_as_written():
    assert [str(v) for v in parse_variants(" fp16+kv16, w4a16+kv4,fp16+kv16")] == [
        "fp16+kv16",
        "w4a16+kv4",
    ]
    assert parse_batches("16,auto,1,16") == (16, None, 1)
    assert parse_bytes("80GB") == 80_000_000_000 and parse_bytes("1.5 GiB") == 3 * 2**29
    assert variants.usual(False, CPU) == "stored+kv16"
