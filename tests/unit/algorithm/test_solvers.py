"""What rounds weights with care, through the public face: models, options, checkpoints."""

import json
from dataclasses import asdict
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quark.torch import ModelImporter, ModelQuantizer
from quark.torch.quantization.config.algo import (
    AutoRoundConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    YaqaConfig,
)
from quark.torch.quantization.config.config import QuantizationSpec
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.preparation import quantized_layers
from tests.configurations import quantized_by
from tests.models.architectures import VARIED, varied

SOLVERS = {
    "gptq": GPTQConfig,
    "qronos": QronosConfig,
    "yaqa": YaqaConfig,
    "autoround": partial(AutoRoundConfig, iters=20, lr=0.05, minmax_lr=0.01),
}
# For tests that do not ask how much is learned.
QUICK = SOLVERS | {"autoround": partial(AutoRoundConfig, iters=4, lr=0.05, minmax_lr=0.01)}
VARIANTS = SOLVERS | {
    "gptaq": GPTAQConfig,
    "in turn": partial(GPTQConfig, true_sequential=True),
    "damping": partial(GPTQConfig, choose_damping=True),
}
SCHEMES = [
    "int4_wo_signed_32",
    "uint4_wo_32",
    "int2_wo_32",
    "mxfp4_weight_only",
    "nvfp4_weight_only",
]
DATA = torch.randint(3, 64, (32, 24), generator=torch.Generator().manual_seed(6))


quantized = partial(quantized_by, data=[DATA])


@torch.no_grad()
def logits_of(model, ids=DATA):
    return model(ids).logits


def weights_of(model):
    return {name: layer.weight.detach().clone() for name, layer in quantized_layers(model)}


def error(model, name, *algorithms, **rest):
    """Change of the logits of the calibration data."""
    expected = logits_of(model)
    return float((logits_of(quantized(model, name, *algorithms, **rest)) - expected).norm())


@cache
def error_of(model, name, solver=None):
    """Return the error of a model under an algorithm; several tests compare with the same ones."""
    return error(varied(model), name, *([VARIANTS[solver]()] if solver else []))


@cache
def error_of_block(name, solver=None, dtype=torch.float32):
    """Return the error of a model of one decoder block."""
    model = varied("llama", dtype, num_hidden_layers=1)
    return error(model, name, *([SOLVERS[solver]()] if solver else []))


# ---- what models compute ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "solver"),
    [*((name, "gptq") for name in VARIED), *(("llama", solver) for solver in VARIANTS)],
)
@pytest.mark.sampled(3)
def test_models_lose_less_than_by_rounding(name, solver):
    plain = error_of(name, "int4_wo_32")
    assert error_of(name, "int4_wo_32", solver) < 0.85 * plain


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.sampled(6)
def test_formats_lose_less_than_by_rounding(name, solver):
    assert error_of_block(name, solver) < 0.85 * error_of_block(name)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.sampled(2)
def test_it_goes_together_with_awq(solver):
    alone = error_of("llama", "int4_wo_32", solver)
    both = error(varied("llama"), "int4_wo_32", AWQConfig(), SOLVERS[solver]())
    assert both < 1.1 * alone < error(varied("llama"), "int4_wo_32", AWQConfig())


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.sampled(6)
def test_the_same_each_time(name, solver):
    first, second = (
        weights_of(quantized(varied(name), "int4_wo_32", QUICK[solver]())) for _ in range(2)
    )
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("solver", VARIANTS)
@pytest.mark.sampled(3)
def test_other_batches_lose_the_same(solver):
    """Sums differ in their last bits, which single codes may follow."""
    whole = error_of("llama", "int4_wo_32", solver)
    cut = error(varied("llama"), "int4_wo_32", VARIANTS[solver](), data=DATA.split(5))
    assert cut == pytest.approx(whole, rel=0.03)


@torch.no_grad()
def seen_by(model, layers):
    """The inputs of layers, before they are rounded, when a model runs on the data."""
    seen = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda m, args, name=name: seen.update({name: args[0].flatten(0, -2).clone()})
        )
        for name, layer in layers.items()
    ]
    model(DATA)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", ["mxfp4", "int4_wa_32"])
@pytest.mark.parametrize("solver", ["gptq", "qronos", "yaqa", "in turn"])
@pytest.mark.sampled(3)
def test_biases_take_what_rounded_inputs_add_in_the_mean(name, solver):
    """After GELU small values have one sign. Later layers of a block see other inputs in GPTQ."""
    floats = varied("gpt2").state_dict()
    model = quantized(varied("gpt2"), name, VARIANTS[solver]())
    layers = {n: m for n, m in quantized_layers(model) if m.bias is not None}
    if solver == "gptq":
        layers = {n: m for n, m in layers.items() if n.endswith("h.0.attn.c_attn")}
    assert layers
    moved = 0.0
    for path, x in seen_by(model, layers).items():
        layer = layers[path]
        noise = (layer.rounded_input(x) - x).mean(0)
        change = layer.bias.detach() - floats[f"{path}.bias"]
        torch.testing.assert_close(change, -noise @ layer.weight, rtol=1e-3, atol=1e-5)
        moved = max(moved, float(change.abs().max()))
    assert moved > 1e-4


@pytest.mark.parametrize("solver", ["gptq", "yaqa"])
def test_layers_may_round_the_same_tensor_in_other_ways(solver):
    """Inputs of queries stay, those of values are mxfp8: each has the noise of its own format."""
    floats = varied("opt").state_dict()
    others = {"*q_proj": scheme("mxfp4_weight_only"), "*v_proj": scheme("w_mxfp4_a_mxfp8")}
    model = quantized(varied("opt"), "mxfp4", VARIANTS[solver](), layer_quant_config=others)
    layers = {
        n: m for n, m in quantized_layers(model) if n.endswith(("k_proj", "q_proj", "v_proj"))
    }
    first = {n: m for n, m in layers.items() if ".0." in n}
    for path, x in seen_by(model, first).items():
        layer = first[path]
        expected = -layer.weight @ (layer.rounded_input(x) - x).mean(0)
        change = layer.bias.detach() - floats[f"{path}.bias"]
        torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-5)
        assert path.endswith("q_proj") != bool(change.abs().max() > 1e-5)


@pytest.mark.parametrize("solver", ["gptq", "qronos", "yaqa"])
def test_biases_stay_where_inputs_stay(solver):
    floats = varied("gpt2").state_dict()
    found = quantized(varied("gpt2"), "int4_wo_32", VARIANTS[solver]()).state_dict()
    assert all(torch.equal(found[n], x) for n, x in floats.items() if n.endswith("bias"))


MASK = torch.arange(24) < torch.tensor([24, 5, 9, 24, 3, 24, 7, 24]).unsqueeze(1)
CUTS = {  # eight sequences and more, in batches of so many
    "alike": lambda size: [*DATA[:8].split(size)],
    "padded": lambda size: [
        {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}
        for ids, mask in zip(DATA[:8].split(size), MASK.split(size), strict=True)
    ],
    "two lengths": lambda size: [*DATA[:8].split(size), *DATA[8:13, :7].split(size)],
}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("data", CUTS.values(), ids=CUTS)
@pytest.mark.sampled(3)
def test_what_is_learned_is_the_same_bits_in_any_batches(data, name):
    options = AutoRoundConfig(iters=4, lr=0.05, minmax_lr=0.02, batch_size=3)
    expected, *others = (
        weights_of(quantized(varied(name), "uint4_wo_32", options, data=data(size)))
        for size in (1, 3, 8)
    )
    for found, layer in product(others, expected):
        assert torch.equal(found[layer], expected[layer]), layer


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.sampled(4)
def test_half_precision(dtype, solver):
    plain = error_of_block("int4_wo_32", None, dtype)
    model = varied("llama", dtype, num_hidden_layers=1)
    assert error(model, "int4_wo_32", SOLVERS[solver]()) < 0.85 * plain
    assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.sampled(3)
def test_experts_that_saw_few_tokens_or_none(name, solver):
    few = torch.tensor([[7, 9, 7]])
    model = quantized(varied(name), "int4_wo_32", QUICK[solver](), data=[few])
    plain = quantized(varied(name), "int4_wo_32")
    expected = logits_of(varied(name))
    found, nearest = logits_of(model) - expected, logits_of(plain) - expected
    assert float(found.norm()) < 1.5 * float(nearest.norm())


# ---- what is left of it -------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
def test_values_and_scales_are_kept(solver):
    """Neither calibration nor freezing touches what was solved for."""
    model = varied("llama")
    model = quantized(model, "w_uint4_per_group_a_int8_per_tensor", QUICK[solver](), frozen=False)
    layers = dict(quantized_layers(model))
    assert all(layer.frozen for layer in layers.values())
    for layer in layers.values():
        assert torch.equal(layer.quantized_tensor("weight").value(torch.float32), layer.weight)
        assert layer.input_quantizer.scale is not None
    before = weights_of(model)
    after = weights_of(ModelQuantizer.freeze(model))
    assert all(torch.equal(after[n], before[n]) for n in before)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["nvfp4_weight_only", "int8_tensor"])
@pytest.mark.sampled(3)
def test_layers_that_are_served_together_share_a_scale(name, solver):
    weight = QuantizationSpec(dtype="int8", qscheme="per_tensor", symmetric=True, is_dynamic=False)
    layers = scheme("nvfp4_weight_only")
    layers.weight = weight if name == "int8_tensor" else layers.weight
    groups = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
    model = quantized(varied("llama"), layers, QUICK[solver](), shared_scale_groups=groups)
    part = "scale" if name == "int8_tensor" else "scale_2"
    for block in model.model.layers:
        for parent, names in zip((block.self_attn, block.mlp), groups, strict=True):
            scales = {float(getattr(getattr(parent, n).weight_quantizer, part)) for n in names}
            assert len(scales) == 1


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "nvfp4_weight_only"),
        *((name, "int4_wo_32") for name in ("tied", "opt", "qwen3_moe", "gpt2")),
    ],
)
@pytest.mark.sampled(6)
def test_a_model_comes_back_bit_by_bit(name, kind, solver, export):
    options = QUICK[solver]()
    model = quantized(varied(name), kind, options)
    expected, path = logits_of(model), export(model)
    fresh = ModelImporter(path).import_model_info(varied(name))
    assert torch.equal(logits_of(fresh), expected)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert torch.equal(logits_of(loaded), expected)
    said = json.loads((path / "config.json").read_text())["quantization_config"]["algo_config"]
    assert said == [asdict(options)]


def test_embeddings_that_are_tied_stay_what_they_are():
    model = varied("tied")
    table = model.model.embed_tokens.weight.detach().clone()
    quantized(model, "int4_wo_32", GPTQConfig())
    assert torch.equal(model.model.embed_tokens.weight, table)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
def test_layers_that_are_named(solver):
    options = QUICK[solver](
        inside_layer_modules=["self_attn.q_proj", "mlp.down_proj", "other"],
        model_decoder_layers="model.layers",
    )
    model = quantized(varied("llama"), "int4_wo_32", options, frozen=False)
    frozen = {n.split(".", 3)[-1] for n, layer in quantized_layers(model) if layer.frozen}
    assert frozen == {"self_attn.q_proj", "mlp.down_proj"}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    "written",
    [{"inside_layer_modules": ["proj"]}, {"model_decoder_layers": "transformer.h"}],
    ids=["layers", "blocks"],
)
def test_names_that_lead_nowhere(written, solver, unchanged):
    model = varied("llama")
    with unchanged(model), pytest.raises(ValueError, match="Leave both empty for all"):
        quantized(model, "int4_wo_32", SOLVERS[solver](**written))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (GPTQConfig(damp_percent=-0.1), "gptq: damp_percent must be between 0 and 1, got -0.1"),
        (GPTAQConfig(damp_percent=1.5), "gptaq: damp_percent must be between 0 and 1, got 1.5"),
        (GPTAQConfig(alpha=-1.0), "gptaq: alpha must be between 0 and 1, got -1.0"),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else None,
)
def test_options_out_of_range(options, said, unchanged):
    model = varied("llama")
    with unchanged(model), pytest.raises(ValueError, match=said):
        quantized(model, "int4_wo_32", options)


@pytest.mark.parametrize("solver", SOLVERS)
def test_formats_without_scales(solver, unchanged):
    model = varied("llama")
    with unchanged(model), pytest.raises(ValueError, match=r"applies to none of .* needs weights"):
        quantized(model, "bfloat16", SOLVERS[solver]())


# ---- other modules ------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A block with a convolution and a look-up beside a linear layer."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(32, 32, 3, padding=1)
        self.table = nn.Embedding(8, 32)
        self.out = nn.Linear(32, 32)

    def forward(self, hidden_states):
        mixed = self.mix(hidden_states.transpose(1, 2)).transpose(1, 2)
        ids = torch.zeros(hidden_states.shape[:2], dtype=torch.long)
        return hidden_states + self.out(mixed + self.table(ids))


class Model(nn.Module):
    """Two such blocks on top of an embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Mixed() for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("solver", SOLVERS)
def test_look_ups_are_left_to_rounding(solver):
    ids = DATA[:4].repeat(1, 2)[:, :32]  # as many tokens as channels
    others = {"*mix": scheme("int8_wo"), "*table": scheme("int8_wo")}
    rest = {"data": [ids], "exclude": ["head", "embed"], "layer_quant_config": others}
    found = weights_of(quantized(Model(), "int8_wo", SOLVERS[solver](), **rest))
    expected = weights_of(quantized(Model(), "int8_wo", **rest))
    same = {n.split(".")[-1] for n in expected if torch.equal(found[n], expected[n])}
    assert same == {"table"} and len(found) == 6
