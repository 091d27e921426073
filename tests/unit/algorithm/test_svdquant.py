"""SVDQuant: branches against exact singular values, errors against rounding to the nearest."""

import pytest
import torch

from quark.torch import (
    ModelExporter,
    ModelImporter,
    load_params,
    save_params,
)
from quark.torch.algorithm.svdquant import apply, low_rank_factors, resolve
from quark.torch.export.recognition import load_checkpoint, load_in_float
from quark.torch.numerics.hadamard import hadamard
from quark.torch.quantization.config import algo
from quark.torch.quantization.config.compatibility import check_compatibility
from quark.torch.report.measurement import measure
from tests.configurations import config as config_for
from tests.configurations import groups, preset, quantized, quantized_by
from tests.models.architectures import VARIED, tokens, varied
from tests.unit.algorithm.contexts import context_of, logits_of, outliers

SMALL = {"svd_rank": 4, "min_layer_size": 0}
SVD = algo.SVDQuantConfig(**SMALL)
DOWN = "model.layers.0.mlp.down_proj"
BATCHES = [tokens(40), tokens(60)]
INT4 = config_for(groups("int4"), groups("int4", is_dynamic=True)).global_quant_config


@pytest.mark.parametrize("shape", [(20, 30), (200, 120), (120, 200)], ids=str)
def test_the_best_approximation_of_a_rank(shape):
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(*shape, generator=generator)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    matrix = left * (values * 0.8 ** torch.arange(len(values))) @ right
    up, down = low_rank_factors(matrix, 6)
    assert up.shape == (shape[0], 6) and down.shape == (6, shape[1])
    best = torch.linalg.svdvals(matrix)[6:].square().sum().sqrt()
    assert (matrix - up @ down).norm() < 1.02 * best
    torch.testing.assert_close(up.norm(dim=0), down.norm(dim=1))


@pytest.mark.parametrize("search", [True, False])
def test_the_float_model_computes_the_same(search):
    model = outliers()
    expected = logits_of(model)
    context = context_of(model)
    before = context.layers[DOWN].weight.detach().clone()
    apply(context, algo.SVDQuantConfig(**SMALL, search_alpha=search))
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-3, atol=1e-4)
    layer = context.layers[DOWN]
    assert (layer.weight * layer.input_prescale).norm() < 0.99 * before.norm()
    torch.testing.assert_close(layer.merged_weight(layer.weight.detach()), before)


def test_layers_that_read_one_tensor_share_factors():
    context = context_of(outliers())
    apply(context, SVD)
    attention = [context.layers[f"model.layers.0.self_attn.{n}_proj"] for n in "qkv"]
    first, *others = (layer.input_prescale for layer in attention)
    assert all(torch.equal(first, other) for other in others)
    channels = torch.tensor([3, 17, 40])  # those of the outliers are scaled down most
    assert first[channels].max() < first.median() / 4


def error(model, expected):
    return float((logits_of(model) - expected).norm() / expected.norm())


@pytest.mark.parametrize("scheme", ["mxfp4", INT4], ids=["mxfp4", "int4"])
def test_planted_outliers_cost_less(scheme):
    expected = logits_of(outliers())
    plain, divided, rounded = (
        error(quantized_by(outliers(), scheme, *algorithms, data=BATCHES), expected)
        for algorithms in ((), (SVD,), (algo.SVDQuantConfig(**SMALL, use_gptq=True),))
    )
    assert divided < 0.5 * plain
    assert rounded < divided


def test_no_outliers_lose_nothing():
    expected = logits_of(varied("llama"))
    plain, divided = (
        error(quantized_by(varied("llama"), "mxfp4", *algorithms, data=BATCHES), expected)
        for algorithms in ((), (SVD,))
    )
    assert divided < plain


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_other_layers(name):
    """Conv1D, whose weight is transposed, and experts."""
    expected = logits_of(varied(name))
    plain, divided = (
        error(quantized_by(varied(name), "w_int4_per_channel_sym", *a, data=BATCHES), expected)
        for a in ((), (SVD,))
    )
    assert divided < plain
    assert name in VARIED


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"svd_rank": 64}, r"svd_rank=64 does not fit .* it must be below \d+"),
        ({"min_layer_size": 1000}, "no linear layer .* Set a smaller min_layer_size"),
        ({"exclude_patterns": ["model.*"]}, "no linear layer"),
        ({"low_rank_layers": ["lm_head"]}, "low_rank_layers has 'lm_head'"),
        ({"gptq_n_bits": 8}, "gptq_n_bits=8 is not supported: the scheme"),
    ],
)
def test_refused_before_the_model_changes(options, said, unchanged):
    model = varied("llama")
    config = preset("mxfp4", algo.SVDQuantConfig(**{**SMALL, **options}))
    with unchanged(model), pytest.raises(ValueError, match=said):
        check_compatibility(config)
        quantized(model, config, BATCHES)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"svd_rank": 0}, "svd_rank must be at least 1, got 0"),
        ({"smooth_alpha": 2.0}, "smooth_alpha must be between 0 and 1, got 2.0"),
        ({"alpha_candidates": [0.5, -1.0]}, r"alpha_candidates\[1\] must be between 0 and 1"),
        ({"alpha_search_max_samples": 0}, "alpha_search_max_samples must be at least 1"),
    ],
)
def test_options_out_of_range(options, said):
    with pytest.raises(ValueError, match=said):
        algo.SVDQuantConfig(**options)


def test_an_exclusion_that_matches_nothing_warns(caplog):
    resolve(
        context_of(varied("llama")),
        algo.SVDQuantConfig(**SMALL, exclude_patterns=["*.1.*", "*up_porj"]),
    )
    assert "exclude_patterns has '*up_porj', which matches no module" in caplog.text
    assert "Nearest: up_proj" in caplog.text and "'*.1.*'" not in caplog.text


@pytest.mark.parametrize("later", [algo.AWQConfig(), algo.RotationConfig(), SVD])
def test_what_changes_weights_comes_first(later):
    with pytest.raises(ValueError, match=r"follows svdquant, .* Put svdquant after"):
        quantized(varied("llama"), preset("mxfp4", SVD, later), BATCHES)


def test_layers_are_selected_by_name_and_size():
    context = context_of(varied("llama"))
    options = algo.SVDQuantConfig(**SMALL, exclude_patterns=["*.1.*", "*_proj"])
    with pytest.raises(ValueError, match="no linear layer"):
        resolve(context, options)
    options.exclude_patterns = ["*.1.*", "*.self_attn.*"]
    apply(context, options)
    divided = {name for name, layer in context.layers.items() if layer.low_rank_up is not None}
    assert divided == {f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")}


def test_rotated_inputs_are_not_smoothed():
    context = context_of(varied("llama"))
    expected = logits_of(context.model)
    layer = context.layers[DOWN]
    layer.rotate_input(hadamard(32))
    apply(context, SVD)
    assert bool((layer.input_prescale == 1).all()) and bool(layer.low_rank_up.any())
    torch.testing.assert_close(logits_of(context.model), expected, rtol=1e-3, atol=1e-4)


# ---- files --------------------------------------------------------------------------------------


@pytest.fixture
def divided(build):
    def divided(dtype=torch.float32, scheme="mxfp4", **options):
        options = algo.SVDQuantConfig(**{**SMALL, **options})
        return quantized_by(build("llama", dtype=dtype), scheme, options, data=BATCHES)

    return divided


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("container", ["safetensors", "native"])
def test_files_give_the_same_bits(dtype, container, divided, export, build, tmp_path):
    model = divided(dtype, exclude_patterns=["*k_proj"])
    if container == "safetensors":
        path = export(model)
        read = [load_checkpoint(path), load_checkpoint(path, max_memory=1 << 40)]
        arch = build("llama", dtype=dtype, device="meta")
        read.append(ModelImporter(path, "safetensors").import_model_info(arch))
    else:
        save_params(model, "llama", export_dir=tmp_path / "out")
        files = {"json_path": "llama.json", "safetensors_path": "llama.safetensors"}
        paths = {key: tmp_path / "out" / name for key, name in files.items()}
        read = [load_params(build("llama", dtype=dtype), **paths)]
    for other in read:
        assert torch.equal(logits_of(other), logits_of(model))
    layer = read[0].get_submodule(DOWN)
    assert layer.low_rank_down.dtype == dtype
    assert read[0].model.layers[0].self_attn.k_proj.low_rank_up is None


def test_transformers_loads_the_branches(divided, export):
    from transformers import AutoModelForCausalLM

    model = divided(torch.bfloat16)
    read = AutoModelForCausalLM.from_pretrained(export(model), dtype="auto")
    assert torch.equal(logits_of(read), logits_of(model))


def test_a_merged_model_has_plain_weights(divided, export):
    """With weights alone quantized, one float weight takes the place of all parts."""
    model = divided(scheme="w_int4_per_channel_sym")
    merged = load_in_float(export(model))
    assert not [n for n in merged.state_dict() if "low_rank" in n or "prescale" in n]
    torch.testing.assert_close(logits_of(merged), logits_of(model), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["gptq", "compressed-tensors"])
def test_formats_without_branches_refuse_them(mode, divided, export):
    with pytest.raises(ValueError, match="it has a low-rank branch"):
        export(divided(scheme="int4_wo_32"), custom_mode=mode)


@pytest.mark.nightly
def test_an_onnx_graph(divided, run_onnx, tmp_path):
    model = divided()
    ids = tokens(20)
    ModelExporter(None, tmp_path / "onnx").export_onnx_model(model, ids)
    (result,) = run_onnx(tmp_path / "onnx", ids)
    torch.testing.assert_close(result, model(ids).logits.detach(), rtol=1e-3, atol=1e-3)


def test_a_report_compares_with_both_parts(divided, build, export, tmp_path):
    build("llama").save_pretrained(tmp_path / "original")
    paths = [export(quantized_by(build("llama"), "mxfp4", data=BATCHES)), export(divided())]
    plain, other = (measure(p, tmp_path / "original", tokens().repeat(2, 1)) for p in paths)
    for before, after in zip(plain.layers, other.layers, strict=True):
        assert after.error.change == "rounded" and after.error.relative < before.error.relative
        assert after.output_error < 1.2 * before.output_error
        assert after.bits_per_weight > before.bits_per_weight  # the branch counts


def test_a_loaded_checkpoint_is_written_again(divided, export):
    path = export(divided())
    again = export(load_checkpoint(path))
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (path / name).read_bytes()
