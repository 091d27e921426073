"""Scales and norms that train after quantization, under fixed codes."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch import Journal, LLMTemplate, ModelExporter, ModelImporter, ModelQuantizer
from quark.torch.distillation import DistillationOptions, _Run, copy_of, distill
from quark.torch.pipeline.journal import PassFiles
from quark.torch.quantization.config.config import Config, Int8PerTensorSpec
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.preparation import quantized_layers
from tests.configurations import groups, preset
from tests.models.test_streamed import streamed

IDS = torch.randint(3, 64, (9, 16), generator=torch.Generator().manual_seed(5))
BATCHES = list(IDS.split(3))
SHORT = DistillationOptions(steps=6, interval=2, batch_size=2)
QUICK = DistillationOptions(steps=30, interval=3, patience=10, learning_rate=3e-3)
FEW = replace(QUICK, steps=9)


@pytest.fixture
def pair(build):
    """Quantize a copy of a model; return it and the model."""

    def pair(config, **options):
        original = build(**options)
        model = ModelQuantizer(config).quantize_model(copy_of(original), BATCHES)
        return ModelQuantizer.freeze(model), original

    return pair


@torch.no_grad()
def divergence(model, original, ids):
    """KL(original ‖ model) at a position, by its definition."""
    p, q = (m(ids).logits.double().log_softmax(-1) for m in (original, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


def codes_of(model):
    return {n: layer.quantized_tensor("weight").codes for n, layer in quantized_layers(model)}


def zero_points_of(model):
    layers = dict(quantized_layers(model))
    return {name: layer.weight_quantizer.zero_point.clone() for name, layer in layers.items()}


def bits(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


SCHEMES = {
    "int3": scheme("int3_wo_signed_32"),
    "uint4": scheme("uint4_wo_32"),
    "scales in bfloat16": Config(
        replace(scheme("int4_wo_32"), weight=groups("int4", scale_type="bfloat16"))
    ).global_quant_config,
    "rows in fp8": scheme("ptpc_fp8"),
    "nvfp4": scheme("nvfp4"),
    "two stages": scheme("int4_fp8"),
}


@pytest.mark.parametrize("layer", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.sampled(3)
def test_predictions_come_closer_under_the_same_codes(layer, pair, tmp_path):
    model, original = pair(preset(layer))
    before, float_bits = codes_of(model), bits(original)
    first = divergence(model, original, IDS[-1:])
    result = distill(model, original, BATCHES, QUICK)
    assert result.before == pytest.approx(first, rel=1e-3)
    assert result.after == pytest.approx(divergence(model, original, IDS[-1:]), rel=1e-3)
    assert result.after < result.before and 0 < result.best <= result.steps
    assert result.scales and result.norms == 5 * original.config.hidden_size
    after = codes_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert same(bits(original), float_bits)
    ModelExporter(None, tmp_path).export_safetensors_model(model)
    read = ModelImporter(tmp_path, "safetensors").import_model_info(copy_of(original))
    with torch.no_grad():
        assert torch.equal(read(IDS).logits, model(IDS).logits)


def test_zero_points_in_floats_train(pair, tmp_path):
    layer = replace(scheme("uint4_wo_32"), weight=groups("uint4", False, zero_point_type="float32"))
    model, original = pair(Config(layer, exclude=["lm_head"]))
    before, zeros = codes_of(model), zero_points_of(model)
    result = distill(model, original, BATCHES, QUICK)
    assert result.zero_points == result.scales > 0 and result.after < result.before
    assert result.after == pytest.approx(divergence(model, original, IDS[-1:]), rel=1e-3)
    assert all(torch.equal(before[n], codes) for n, codes in codes_of(model).items())
    assert all(not torch.equal(zeros[n], zero) for n, zero in zero_points_of(model).items())
    ModelExporter(None, tmp_path).export_safetensors_model(model)
    read = ModelImporter(tmp_path, "safetensors").import_model_info(copy_of(original))
    with torch.no_grad():
        assert torch.equal(read(IDS).logits, model(IDS).logits)


def test_integer_zero_points_stay(pair):
    model, original = pair(preset("uint4_wo_32"))
    zeros = zero_points_of(model)
    assert distill(model, original, BATCHES, FEW).zero_points == 0
    assert all(torch.equal(zeros[n], zero) for n, zero in zero_points_of(model).items())


def test_the_same_data_gives_the_same_bits(pair):
    found = []
    for _ in range(2):
        model, original = pair(preset("int3_wo_32"))
        assert distill(model, original, BATCHES, FEW).best > 0
        found.append(bits(model))
    assert same(*found)


def test_a_finish_that_does_not_help_changes_nothing(pair):
    model, original = pair(preset("int4_wo_32"))
    before = bits(model)
    result = distill(model, original, BATCHES, replace(QUICK, learning_rate=1e3, kept_back=0.3))
    assert (result.best, result.after) == (0, result.before) and result.change_error == 0
    assert same(bits(model), before)


def test_training_stops_where_nothing_gets_better(pair):
    model, original = pair(preset("int4_wo_32"))
    options = DistillationOptions(steps=50, interval=2, patience=2, learning_rate=1e3)
    assert distill(model, original, BATCHES, options).steps == 4


@pytest.mark.parametrize("name", ["mxfp4", "shared nvfp4"])
@pytest.mark.sampled(2)
def test_scales_that_stay(name, pair):
    """Powers of two, and scales that layers share: norms train alone."""
    shared = LLMTemplate.get("llama").get_config("nvfp4")
    model, original = pair(shared if "nvfp4" in name else preset(name))
    state = {n: q.clone() for n, q in model.state_dict().items() if "scale" in n}
    result = distill(model, original, BATCHES, FEW)
    assert result.scales == 0 and result.norms
    assert all(torch.equal(value, model.state_dict()[n]) for n, value in state.items())


def test_biases_train_unless_they_are_quantized(pair):
    """A GPT-2 has a bias in each layer; its codes stay."""
    config = preset(scheme("mxfp4"))
    model, original = pair(config, name="gpt2")
    before = codes_of(model), bits(model)
    result = distill(model, original, BATCHES, QUICK)
    layers = dict(quantized_layers(model))
    assert result.best and result.biases == sum(x.bias.numel() for x in layers.values())
    assert result.after < result.before
    assert all(not torch.equal(x.bias, before[1][f"{n}.bias"]) for n, x in layers.items())
    codes = codes_of(model)
    assert all(torch.equal(before[0][n], codes[n]) for n in codes)


def test_quantized_biases_stay(pair):
    bias = Int8PerTensorSpec().to_quantization_spec()
    config = preset(replace(scheme("int4_wo_32"), bias=bias))
    model, original = pair(config, name="gpt2")
    before = bits(model)
    result = distill(model, original, BATCHES, FEW)
    assert result.best and result.biases == 0
    names = [f"{n}.bias" for n, _ in quantized_layers(model)]
    assert names and all(torch.equal(model.state_dict()[n], before[n]) for n in names)


def test_padding_does_not_count(pair):
    model, original = pair(preset("int4_wo_32"))
    junk = torch.randint(3, 64, (9, 5), generator=torch.Generator().manual_seed(6))
    mask = torch.cat([torch.ones_like(IDS), torch.zeros_like(junk)], 1)
    padded = {"input_ids": torch.cat([IDS, junk], 1), "attention_mask": mask}
    found = [distill(copy.deepcopy(model), original, d, FEW) for d in ([IDS], [padded])]
    assert found[1].before == pytest.approx(found[0].before, rel=1e-5)
    assert found[1].after == pytest.approx(found[0].after, rel=1e-3)


# ---- a run that goes on --------------------------------------------------------------------------


@pytest.fixture
def run(build, tmp_path):
    """Quantize and finish a model with a journal, as a process does that begins anew."""

    def run(algorithm, options=SHORT, data=BATCHES):
        original = build()
        config = LLMTemplate.get("llama").get_config("int3_wo_32", algorithm=algorithm)
        with Journal(tmp_path / "journal") as journal:
            quantizer = ModelQuantizer(config, journal=journal)
            model = quantizer.freeze(quantizer.quantize_model(copy_of(original), BATCHES))
            return distill(model, original, data, options, journal=journal), bits(model)

    return run


def stop_at(monkeypatch, name, when):
    """Let writing of a state, or its removal, be the last thing that a process does."""
    method = getattr(PassFiles, name)

    def stop(self, block, *arguments):
        method(self, block, *arguments)
        if block == when:
            raise KeyboardInterrupt

    monkeypatch.setattr(PassFiles, name, stop)


@pytest.mark.parametrize(
    ("algorithm", "name", "when", "left"),
    [("gptq", "write", "2", 4), (None, "remove", "2", 2), (None, "write", "6", 0)],
)
def test_a_killed_finish_goes_on_to_the_same_bits(
    algorithm, name, when, left, run, monkeypatch, tmp_path
):
    expected, values = run(algorithm)
    with Journal(tmp_path / "journal", restart=True):
        pass
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, name, when)
        run(algorithm)
    steps, train = [], _Run.train

    def count(self, sequences, step):
        steps.append(step)
        return train(self, sequences, step)

    monkeypatch.setattr(_Run, "train", count)
    found, others = run(algorithm)
    assert len(steps) == left and found == expected and same(values, others)


def test_one_state_is_kept(run, tmp_path):
    run(None)
    assert len(list((tmp_path / "journal" / "steps").iterdir())) == 1


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("gptq", "2 finished blocks and the last measured step"), (None, "the last measured step")],
)
def test_steps_are_no_blocks(algorithm, expected, run, monkeypatch, tmp_path):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, "write", "2")
        run(algorithm)
    with Journal(tmp_path / "journal") as journal:
        assert journal.describe() == expected and Journal.has_blocks(journal.directory)
        assert journal.finished == (2 if algorithm else 0)
    with Journal(tmp_path / "journal", restart=True) as journal:
        assert journal.describe() == ""


def test_a_damaged_state_is_not_used(run, tmp_path):
    expected, values = run(None)
    [state] = (tmp_path / "journal" / "steps").iterdir()
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    found, others = run(None)
    assert found == expected and same(values, others)


def test_a_journal_of_another_finish(run, build, tmp_path):
    run(None)
    for changed in ({"options": replace(SHORT, learning_rate=1e-3)}, {"data": [IDS[:4]]}):
        with pytest.raises(ValueError, match=r"a finish with other options or data.*--restart"):
            run(None, **changed)
    model = ModelQuantizer.freeze(ModelQuantizer(preset("int4_wo_32")).quantize_model(build()))
    with (
        Journal(tmp_path / "other") as journal,
        pytest.raises(ValueError, match="the journal does not know the model"),
    ):
        distill(model, build(), BATCHES, journal=journal)


# ---- refusals -----------------------------------------------------------------------------------


def test_models_that_are_refused(build, pair, tmp_path):
    model, original = pair(preset("int4_wo_32"))
    with pytest.raises(ValueError, match="1 sequences are too few"):
        distill(model, original, [IDS[:1]])
    with pytest.raises(ValueError, match="not quantized and frozen"):
        distill(build(), original, BATCHES)
    unfrozen = ModelQuantizer(preset("int4_wo_32")).quantize_model(build())
    with pytest.raises(ValueError, match="not quantized and frozen"):
        distill(unfrozen, original, BATCHES)
    original.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="read in parts"):
        copy_of(streamed(tmp_path))


class Plain(nn.Module):
    """A model without norms, biases and logits."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return {"out": self.layer(x)}


@pytest.mark.parametrize(
    ("name", "said"), [("mxfp4", "neither scales"), ("int4_wo_32", "dict without logits")]
)
def test_nothing_to_train_or_to_compare(name, said):
    model = Plain()
    data = list(torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0)))
    config = Config(scheme(name))
    quantized = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(copy_of(model), data))
    with pytest.raises(ValueError, match=said):
        distill(quantized, model, data)


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"learning_rate": 0.0}, {"kept_back": 1.0}, {"patience": 0}]
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match=rf"DistillationOptions\.{next(iter(options))} must be"):
        DistillationOptions(**options)
