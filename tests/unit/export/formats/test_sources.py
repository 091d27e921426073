"""Checkpoints as other tools publish them: values by formulas of their own, and damaged files."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quark.torch.export import convert
from quark.torch.export.recognition import load_checkpoint, load_in_float, read_contents
from quark.torch.quantization.nn.packed import PackedLayer

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 32}
QWEN = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
E8M0 = torch.float8_e8m0fnu


def publish(model, path, section, change):
    """Save a model, its tensors changed by ``change(tensors)``, with a quantization_config."""
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((path / "config.json").read_text())
    text = json.dumps({**described, "quantization_config": section})
    (path / "config.json").write_text(text)
    return path


def fp8_value(code):
    """The value of an fp8_e4m3 code: sign, four bits of exponent with the bias 7, three bits."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 128 else magnitude


def fp8_values(codes):
    table = np.array([fp8_value(code) for code in range(256)])
    return table[codes.view(torch.uint8).numpy()]


def random_fp8(shape):
    """Random codes without the two that are not numbers."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    return codes.masked_fill(codes & 127 == 127, 0).view(torch.float8_e4m3fn)


def rounded(values):
    """Float64 values, rounded once to bfloat16 by way of float32 products."""
    return torch.from_numpy(values).float().bfloat16()


# ---------------------------------------------------------------------------------- gpt-oss


@pytest.fixture
def oss(build, tmp_path):
    """A gpt-oss with experts in MXFP4, and the values of its experts."""
    values = {}

    def to_blocks(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            grid = (experts, outputs, inputs // 32)
            blocks = np.random.default_rng(len(values)).integers(0, 256, (*grid, 16), np.uint8)
            scales = np.random.default_rng(len(values)).integers(110, 130, grid, np.uint8)
            signed = np.array(FP4 + [-value for value in FP4])
            pairs = np.stack([signed[blocks & 15], signed[blocks >> 4]], -1)  # low bits first
            products = pairs.reshape(*grid, 32) * 2.0 ** (scales[..., None].astype(float) - 127)
            values[name] = rounded(products.reshape(experts, outputs, inputs).swapaxes(1, 2))
            tensors[f"{name}_blocks"] = torch.from_numpy(blocks)
            tensors[f"{name}_scales"] = torch.from_numpy(scales)

    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model = build("gpt_oss", torch.bfloat16, **OSS)
    return publish(model, tmp_path / "oss", section, to_blocks), values


def change_tensors(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


class TestMxfp4:
    def test_values_are_those_of_the_bits(self, oss):
        path, values = oss
        state = load_in_float(path).state_dict()
        assert len(values) == 4
        for name, value in values.items():
            assert torch.equal(state[name], value), name

    def test_transformers_reads_the_same_model(self, oss, logits):
        path, _ = oss
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        state = theirs.state_dict()
        for name, value in load_in_float(path).state_dict().items():
            assert torch.equal(value, state[name]), name
        assert torch.equal(logits(load_in_float(path)), logits(theirs))

    def test_experts_stay_packed(self, oss, logits):
        model = load_checkpoint(oss[0], "float32")
        layers = [m for m in model.modules() if isinstance(m, PackedLayer)]
        assert len(layers) == 2 * 4 * 2
        assert all(layer.weight.codes.dtype == torch.uint8 for layer in layers)
        expected = logits(load_in_float(oss[0], "float32"))
        assert torch.allclose(logits(model), expected, atol=1e-4)

    @pytest.mark.parametrize("to", ["quark", "compressed-tensors"])
    def test_conversion_keeps_the_values(self, oss, tmp_path, logits, to):
        convert(oss[0], tmp_path / "out", to, verify=True)
        expected = load_in_float(oss[0]).state_dict()
        for name, value in load_in_float(tmp_path / "out").state_dict().items():
            assert torch.equal(value, expected[name]), name

    def test_written_again_it_has_the_same_bytes(self, oss, tmp_path):
        convert(oss[0], tmp_path / "out", "mxfp4", verify=True)
        expected = load_file(oss[0] / "model.safetensors")
        result = load_file(tmp_path / "out" / "model.safetensors")
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[name], expected[name]) for name in expected)

    def test_summary(self, oss):
        (scheme,) = read_contents(oss[0]).summary.schemes()
        assert scheme.scheme.weight == "fp4 per group 32 (e8m0 scales)"
        assert scheme.weights == 2 * 4 * 3 * 32 * 64
        assert scheme.bits_per_weight == 4.25

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop(NAME + "_scales"), r"experts\.0\.gate_up_proj.*missing"),
            (lambda t: t[NAME + "_scales"].fill_(255), "not sound, such as nan"),
            (
                lambda t: t.update({NAME + "_blocks": t[NAME + "_blocks"][:3].clone()}),
                r"3\.gate_up_proj\.weight",
            ),
            (lambda t: t.update({NAME + "_blocks": t[NAME + "_blocks"].flatten()}), "stacked"),
            (lambda t: t.update({NAME + "_blocks": t[NAME + "_blocks"][:, :32].clone()}), r"\["),
            (lambda t: t.update({NAME + "_scales": t[NAME + "_scales"].float()}), "float32"),
            (lambda t: [t.pop(n) for n in list(t) if n.endswith("_blocks")], "no experts"),
        ],
    )
    def test_damage_is_refused(self, oss, change, message):
        change_tensors(oss[0], change)
        with pytest.raises(ValueError, match=message):
            load_in_float(oss[0])


NAME = "model.layers.0.mlp.experts.gate_up_proj"

# -------------------------------------------------------------------------------------- fp8


def publish_fp8(model, path, block, scale_dtype=torch.float32, **section):
    """Publish a model in fp8; returns the directory and the values of its weights."""
    values = {}

    def to_codes(tensors):
        for name in [n for n in tensors if n.endswith("proj.weight")]:
            shape = tensors[name].shape
            tensors[name] = codes = random_fp8(shape)
            grid = [-(-side // block) for side in shape] if block else []
            scale = torch.exp2(torch.randint(-9, -5, grid))
            scale = scale if scale_dtype == E8M0 else scale * torch.rand(grid).add(0.5)
            tensors[f"{name}_scale_inv"] = scale = scale.to(scale_dtype)
            spread = scale.double().numpy()
            if block:
                spread = np.kron(spread, np.ones((block, block)))[: shape[0], : shape[1]]
            values[name] = rounded(fp8_values(codes) * spread)

    section |= {"quant_method": "fp8", "weight_block_size": [block, block] if block else None}
    return publish(model, path, section, to_codes), values


def assert_values(path, values):
    state = load_in_float(path).state_dict()
    assert len(values) >= 7
    for name, value in values.items():
        assert torch.equal(state[name], value), name


class TestFp8:
    def test_blocks_that_do_not_divide_the_shape(self, build, tmp_path):
        model = build(dtype=torch.bfloat16, intermediate_size=80)
        path, values = publish_fp8(model, tmp_path / "out", 32, activation_scheme="dynamic")
        assert_values(path, values)

    @pytest.mark.parametrize("dtype", [torch.float32, E8M0])
    def test_powers_of_two(self, build, tmp_path, dtype):
        model = build(dtype=torch.bfloat16)
        path, values = publish_fp8(model, tmp_path / "out", 32, dtype, scale_fmt="ue8m0")
        assert_values(path, values)

    def test_scales_per_tensor_by_other_names(self, build, tmp_path):
        path, values = publish_fp8(
            build(dtype=torch.bfloat16), tmp_path / "out", None, activation_scheme="static"
        )
        names = [name.replace("weight", "activation_scale") for name in values]
        change_tensors(path, lambda t: t.update({name: torch.tensor(0.5) for name in names}))
        assert_values(path, values)
        layer = load_checkpoint(path).model.layers[0].mlp.up_proj
        assert layer.quantized_tensor("input_tensors").scale == 0.5

    def test_transformers_dequantizes_to_the_same_values(self, build, tmp_path):
        from transformers import FineGrainedFP8Config

        model = build(dtype=torch.bfloat16)
        path, _ = publish_fp8(model, tmp_path / "out", 32, activation_scheme="dynamic")
        how = FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
        theirs = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, quantization_config=how
        ).state_dict()
        for name, value in load_in_float(path).state_dict().items():
            assert torch.equal(value, theirs[name]), name

    @pytest.mark.parametrize("stacked", [False, True])
    def test_experts(self, build, tmp_path, stacked):
        model = build("qwen3_moe", torch.bfloat16, **QWEN)
        path, values = publish_fp8(model, tmp_path / "out", 16, activation_scheme="dynamic")
        parts = {}
        for name in sorted(name for name in values if ".experts." in name):
            before, _, last = name.rpartition(".experts.")
            _, part, _ = last.split(".")
            parts.setdefault(before, {}).setdefault(part, []).append(values[name])
        if stacked:
            change_tensors(path, stack_experts)
        state = load_in_float(path).state_dict()
        assert len(parts) == 2
        for layer, matrices in parts.items():
            whole = {part: torch.stack(values) for part, values in matrices.items()}
            both = torch.cat([whole["gate_proj"], whole["up_proj"]], 1)
            assert torch.equal(state[f"{layer}.experts.gate_up_proj"], both)
            assert torch.equal(state[f"{layer}.experts.down_proj"], whole["down_proj"])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop(UP + "_scale_inv"), r"mlp\.up_proj\.weight_.*missing"),
            (lambda t: t.update({UP + "_scale_inv": torch.ones(2, 2)}), r"\[2, 2\], expected"),
            (lambda t: t[UP + "_scale_inv"].fill_(torch.inf), "not sound, such as inf"),
            (lambda t: t[UP + "_scale_inv"].neg_(), "not sound, such as -"),
            (lambda t: t.update({UP: t[UP][:8].clone()}), r"\[8, 64\], expected"),
            (lambda t: t.update({UP: t[UP].view(torch.int8)}), "int8"),
        ],
    )
    def test_damage_is_refused(self, build, tmp_path, change, message):
        path, _ = publish_fp8(build(dtype=torch.bfloat16), tmp_path / "out", 32)
        change_tensors(path, change)
        with pytest.raises(ValueError, match=message):
            load_in_float(path)

    def test_unknown_methods_are_refused(self, build, tmp_path):
        path = publish(build(), tmp_path / "out", {"quant_method": "hqq"}, lambda tensors: None)
        with pytest.raises(ValueError, match=r"'hqq' is unknown \(known: quark, .*mxfp4"):
            load_in_float(path)


UP = "model.layers.1.mlp.up_proj.weight"


def stack_experts(tensors):
    """Stack the experts of every layer, codes and scales, as newer checkpoints do."""
    for layer in ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"):
        for end in ("", "_scale_inv"):
            whole = {
                part: torch.stack(
                    [tensors.pop(f"{layer}.{i}.{part}.weight{end}") for i in range(3)]
                )
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            # torch joins no fp8 tensors
            parts = [whole[part].view(torch.uint8) for part in ("gate_proj", "up_proj")]
            both = torch.cat(parts, 1).view(whole["up_proj"].dtype)
            tensors[f"{layer}.gate_up_proj{end}"] = both
            tensors[f"{layer}.down_proj{end}"] = whole["down_proj"]
