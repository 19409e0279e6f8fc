"""`--method finetune` on a CPU: blocks are trained, and kept only if held-out sequences improve;
then scales and norms of the whole model are distilled. Stopped anywhere, it ends in equal bytes."""

import shutil
from dataclasses import replace

import pytest
import torch
from jobs import contents, request
from safetensors.torch import load_file
from thorough import also, some, thorough
from tiny import ARCHITECTURES, write_checkpoint
from torch.nn.functional import scaled_dot_product_attention

from billfish.checkpoints import write as files
from billfish.checkpoints.verify import verify
from billfish.errors import UserError
from billfish.offline import distill, driver
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.offline.text import read_documents
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16_24 import W4A16Sparse
from billfish.schemes.w4ax import W4AX
from billfish.schemes.w2416 import W2416
from billfish.schemes.w2416.codes import TrainableMixed
from billfish.solvers import finetune, training

W3 = W4A16(bits=3, group_size=32, symmetric=False)
TRAINED = {"method": "finetune", "scheme": W3, "nsamples": 96, "steps": 40, "end_to_end": 0}
TRAINED |= {"dtype": torch.float32}  # in bf16, which some CPUs choose, few steps may gain nothing


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source", num_hidden_layers=2)


@pytest.fixture
def prose(tmp_path):
    """The beginning of the shipped sample; for all of it a tokenizer of characters takes 0.5 s."""
    (document,) = read_documents("sample")
    path = tmp_path / "prose.txt"
    path.write_text(document[:40_000])
    return str(path)


@pytest.fixture
def fast(monkeypatch):
    """Rates that show in a few steps of a tiny model."""
    monkeypatch.setattr(finetune, "CODES", 2.5e-3)
    monkeypatch.setattr(finetune, "SCALES", 2e-3)
    monkeypatch.setattr(TrainableMixed, "scale_rate", 1.0)
    monkeypatch.setattr(finetune, "TOKENS", 512)
    monkeypatch.setattr(distill, "TOKENS", 512)
    monkeypatch.setattr(distill, "RATE", 2e-3)


def weights(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("scheme", "scales"),
    [
        (W3, {"weight_scale"}),
        (W2416(3.3), {"scale_base", "weight_scale_4"}),
        also(W4AX(64), {"weight_scale"}),
        also(W4AX(64, True, "fmpq", 0.5, True), {"weight_scale"}),
        (W4A16Sparse(32), {"weight_scale"}),
    ],
    ids=["w4a16", "w2416", "w4ax", "fmpq", "w4a16_24"],
)
def test_training_and_distillation_improve_held_out_sequences(
    tmp_path, source, fast, scheme, scales
):
    asked = request(
        source, tmp_path / "out", "sample", **{**TRAINED, "scheme": scheme, "end_to_end": 20}
    )

    def keep(told):
        if told.step == 0:  # of distillation: all blocks are written
            shutil.copytree(tmp_path / "out", tmp_path / "blocks")

    report = quantize(asked, on_progress=keep)
    told = report["training"]
    assert (told["steps"], told["end_to_end"]) == (40, 20)
    assert [block["block"] for block in told["blocks"]] == [0, 1]
    for gain in (*told["blocks"], told["whole_model"]):
        assert gain["kept"] and gain["after"] < gain["before"] and gain["note"] is None
    assert all(layer["error"] is None for layer in report["layers"])  # GPTQ's no longer hold
    assert verify(tmp_path / "out")["ok"]
    # Distillation changed scales and norms, and no code.
    changed = set()
    for name in weights(tmp_path / "out"):
        before, after = (load_file(tmp_path / folder / name) for folder in ("blocks", "out"))
        changed |= {key for key in before if not torch.equal(before[key], after[key])}
    assert {key.rpartition(".")[2] for key in changed} == {*scales, "weight"}
    assert all("norm" in key for key in changed if key.endswith(".weight"))
    assert "model.norm.weight" in changed


@pytest.mark.parametrize(
    "scheme",
    some(
        [W4A16(4, 32), W4A16(2, 16, False), W4A16(8, -1), W4A16(5, 64), W2416(3.3), W4AX(64)], 1, 2
    ),
)
def test_every_grid_is_trained(tmp_path, fast, scheme, text):
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=1)
    report = quantize(request(source, tmp_path / "out", text, **{**TRAINED, "scheme": scheme}))
    first = report["training"]["blocks"][0]
    assert first["kept"] == (first["after"] < first["before"])
    assert first["kept"] or scheme == W4A16(8, -1)  # 8 bits leave nothing to gain


@pytest.mark.parametrize("architecture", some(ARCHITECTURES, 0, 4, 5, 8))
def test_any_architecture_is_trained(tmp_path, fast, architecture, text):
    model = write_checkpoint(tmp_path / "source", architecture, num_hidden_layers=2)
    asked = request(
        model, tmp_path / "out", text, **{**TRAINED, "end_to_end": 2, "steps": 4, "nsamples": 8}
    )
    if architecture == "BertModel":
        with pytest.raises(UserError, match="no logits to distill"):
            quantize(asked)
        asked = replace(asked, end_to_end=0)
    told = quantize(asked)["training"]
    assert all(gain["after"] is not None for gain in told["blocks"])
    assert architecture == "BertModel" or told["whole_model"]["after"] is not None


@pytest.mark.parametrize("harm", ["no steps", "too far", "nan", "nan at once"])
def test_a_block_that_does_not_improve_stays_as_gptq_left_it(
    tmp_path, source, text, fast, monkeypatch, harm
):
    plain = {"scheme": W3, "dtype": TRAINED["dtype"]}
    quantize(request(source, tmp_path / "gptq", text, **plain))
    steps = 0 if harm == "no steps" else 10
    if harm == "too far":
        monkeypatch.setattr(finetune, "CODES", 3.0)
    if harm == "nan":
        monkeypatch.setattr(finetune, "SCALES", 1e38)
    if harm == "nan at once":
        monkeypatch.setattr(
            finetune, "relative_error", lambda output, target: output.sum() * torch.nan
        )
    report = quantize(
        request(source, tmp_path / "out", text, **{**TRAINED, "steps": steps, "nsamples": 8})
    )
    assert weights(tmp_path / "out") == weights(tmp_path / "gptq")
    for gain in report["training"]["blocks"]:
        assert not gain["kept"]
        assert (gain["after"] is None) == harm.startswith("nan")
        assert (gain["before"] is None) == (harm == "nan at once")
        assert not harm.startswith("nan") or "diverged before step" in gain["note"]


def test_distillation_that_does_not_help_changes_nothing(
    tmp_path, source, prose, fast, monkeypatch
):
    few = {**TRAINED, "steps": 4}
    quantize(request(source, tmp_path / "blocks", prose, **few))
    for rate in (0.5, float("nan")):
        monkeypatch.setattr(distill, "RATE", rate)
        out = tmp_path / f"out-{rate}"
        report = quantize(request(source, out, prose, **{**few, "end_to_end": 12}))
        assert not report["training"]["whole_model"]["kept"]
        assert weights(out) == weights(tmp_path / "blocks")


def test_the_seed_decides(tmp_path, source, prose, fast):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        few = {**TRAINED, "steps": 5, "end_to_end": 10, "nsamples": 24}
        asked = request(source, tmp_path / name, prose, **few)
        quantize(replace(asked, seed=seed))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert weights(tmp_path / "a") != weights(tmp_path / "c")


@thorough
def test_stopped_before_any_write_it_goes_on_to_the_same_bytes(
    tmp_path, source, prose, fast, monkeypatch
):
    """Every file that the job writes is first left half written once, as a kill would."""
    few = {**TRAINED, "steps": 2, "end_to_end": 4, "nsamples": 12}
    monkeypatch.setattr(distill, "TOKENS", 64)
    wanted = request(source, tmp_path / "out", prose, **few)
    quantize(replace(wanted, output=tmp_path / "whole"))
    real, stopped = files.write_atomically, []

    def write(path, fill):
        # A shard is written twice: when its block is done, and when it is distilled.
        place = path.name, path.exists()
        if place not in stopped:
            stopped.append(place)
            path.with_name(path.name + files.TEMPORARY).write_bytes(b"half")
            raise KeyboardInterrupt
        real(path, fill)

    monkeypatch.setattr(files, "write_atomically", write)
    for _ in range(40):
        try:
            quantize(wanted)
            break
        except KeyboardInterrupt:
            assert not (wanted.output / files.MANIFEST).exists()
    names = [name for name, _ in stopped]
    assert driver.TRAINED in names and names.count("model-00002-of-00003.safetensors") == 2
    assert contents(wanted.output) == contents(tmp_path / "whole")


def test_sequences_of_a_step():
    lengths = [100] * 10 + [30] * 10
    found = training.draws(lengths, 300, seed=1)
    for _ in range(50):
        drawn = next(found)
        assert len(set(drawn)) == len(drawn)
        assert 250 <= sum(lengths[i] for i in drawn) <= 400
    assert len(next(training.draws([1024] * 192, 8192, 0))) == 8
    assert len(next(training.draws([4096] * 3, 1024, 0))) == 1
    assert len(next(training.draws([16] * 3, 1024, 0))) == 3
    for count in (2, 8, 24, 192):
        trained, held_out = training.split_held_out(count)
        assert sorted(trained + held_out) == list(range(count)) and trained and held_out


def test_what_cannot_be_trained_is_refused(tmp_path, source):
    with pytest.raises(UserError, match="--method gptq does not train"):
        QuantizeRequest(source, steps=5)
    with pytest.raises(UserError, match="--end-to-end -1"):
        QuantizeRequest(source, method="finetune", end_to_end=-1)
    with pytest.raises(UserError, match="two sequences"):
        quantize(request(source, tmp_path / "out", "sample", **{**TRAINED, "nsamples": 1}))


def test_gradients_of_attention_need_deterministic_algorithms():
    """And nothing else does: matrix products on a GPU would ask for an environment variable."""

    def state():
        return torch.is_deterministic_algorithms_warn_only_enabled()

    seen, x = {}, torch.randn(1, 2, 8, 16).requires_grad_()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with training.FixedOrder():
            before = x * 2
            made = scaled_dot_product_attention(before, before, before)
            made.grad_fn.register_prehook(lambda _: seen.update(inside=state()))
            before.register_hook(lambda _: seen.update(after=state()))
            made.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == {"inside": False, "after": True} and x.grad is not None


@pytest.mark.parametrize(("scheme", "times"), [(W3, 1), (W2416(3.3), 4)], ids=["w4a16", "w2416"])
def test_a_scheme_says_how_fast_its_scales_are_trained(
    tmp_path, source, monkeypatch, scheme, times
):
    rates = set()

    class Recorded(training.Adam):
        def __init__(self, groups):
            super().__init__(groups)
            rates.update(self.rates)

    monkeypatch.setattr(finetune, "Adam", Recorded)
    asked = {**TRAINED, "scheme": scheme, "steps": 1, "nsamples": 8}
    quantize(request(source, tmp_path / "out", "sample", **asked))
    assert rates == {finetune.CODES, times * finetune.SCALES}
