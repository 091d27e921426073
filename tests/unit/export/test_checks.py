"""What is wrong with a model is said before it is written, and what was there stays."""

import pytest
import torch

from quark.demo.text import model_directory
from quark.torch import (
    ModelExporter,
    ModelQuantizer,
    collect_statistics,
    export_gguf,
    export_onnx,
)
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.checkpoint.shards import write_tensors
from quark.torch.export.checks import check_written
from quark.torch.export.expert_tokens import expert_tokens
from quark.torch.quantization.config.config import (
    AWQConfig,
    Config,
    GPTQConfig,
    QuantizationConfig,
    SmoothQuantConfig,
)
from quark.torch.quantization.config.spec import QuantizationSpec

LAYER = "model.layers.1.self_attn.k_proj"
SCHEMES = ("int8", "w_uint4_per_group_asym", "fp8")


def part(tensor, name):
    """Set one element of a part of a quantizer."""

    def change(model, value):
        getattr(getattr(model.get_submodule(LAYER), f"{tensor}_quantizer"), name).flatten()[0] = (
            value
        )

    return change


SCALE, INPUT, OFFSET = part("weight", "scale"), part("input", "scale"), part("weight", "zero_point")


@pytest.fixture
def refused(build, quantize, tmp_path):
    """Change a frozen model and export it over an earlier one, which must stay."""

    def refused(scheme, change, said, **options):
        model = quantize(build(), scheme)
        exporter = ModelExporter(None, tmp_path / "out", overwrite=True)
        exporter.export_safetensors_model(model, **options)
        before = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}
        with torch.no_grad():
            change(model)
        with pytest.raises(ValueError, match=said):
            exporter.export_safetensors_model(model, **options)
        assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == before
        assert [f.name for f in tmp_path.iterdir()] == ["out"]

    return refused


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_that_are_no_numbers(refused, scheme, value):
    said = rf"^{LAYER} cannot be written: the scale of its weight is NaN or infinite in 1 of"
    refused(scheme, lambda m: SCALE(m, value), said)


@pytest.mark.parametrize("mode", ["awq", "gptq", "compressed-tensors"])
def test_formats_of_other_tools_are_looked_at_too(refused, mode):
    said = rf"^{LAYER} cannot be written: the scale of its weight is NaN"
    change = lambda m: SCALE(m, float("nan"))  # noqa: E731
    refused("w_uint4_per_group_asym", change, said, custom_mode=mode)


@pytest.mark.parametrize(
    ("scheme", "change", "what"), [("int8", INPUT, "input"), ("fp8", SCALE, "weight")]
)
def test_negative_scales(refused, scheme, change, what):
    """Weights in integers may have them, as they may when a checkpoint is read."""
    refused(scheme, lambda m: change(m, -1.0), f"the scale of its {what} is negative")


def test_scales_of_inputs_that_vanished(refused):
    refused("int8", lambda m: INPUT(m, 0.0), "the scale of its input is 0")


def test_weights_whose_scale_vanished(refused):
    refused("w_uint4_per_group_asym", lambda m: SCALE(m, 0.0), r"\d+ codes of its weight have the")


def test_zero_points_that_are_no_codes(refused):
    said = r"zero points of its weight reach from \d+ to 16, codes only from 0 to 15"
    refused("w_uint4_per_group_asym", lambda m: OFFSET(m, 16), said)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_broken_values_of_what_is_not_quantized(refused, name):
    def change(model):
        model.get_parameter(name).flatten()[3] = float("nan")

    refused("int8", change, rf"^{name} is NaN or infinite in 1 of")


def test_a_layer_that_was_replaced_after_quantization(refused):
    def change(model):
        model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 96, bias=False)

    refused("int8", change, r"mlp\.up_proj and 0 more layers are in float, but the configuration")


def test_a_scale_of_0_where_all_weights_are_0(build, quantize, tmp_path, logits):
    model = quantize(build(), "w_uint4_per_group_asym")
    quantizer = model.get_submodule(LAYER).weight_quantizer
    with torch.no_grad():
        model.get_submodule(LAYER).weight[0, :32] = 0
        quantizer.scale[0, 0] = 0
        quantizer.zero_point[0, 0] = 0
    ModelExporter(tmp_path / "out").export_safetensors_model(model)


def test_gguf(build, quantize, tmp_path):
    pytest.importorskip("gguf")
    weight = QuantizationSpec(
        "int4", qscheme="per_group", ch_axis=-1, group_size=32, is_dynamic=False
    )
    layer = QuantizationConfig(weight=weight)
    model = quantize(build(vocab_size=2048), Config(layer, exclude=["lm_head"]), None)
    SCALE(model, float("nan"))
    with pytest.raises(ValueError, match=rf"^{LAYER}\.weight cannot be written: the scale"):
        export_gguf(model, tmp_path / "out", "small", model_directory())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "expected",
    [
        {"a": torch.ones(2), "b": torch.ones(1)},
        {"a": torch.ones(1, 2)},
        {"a": torch.ones(2, dtype=torch.float16)},
    ],
    ids=["missing", "shape", "type"],
)
def test_files_are_compared_with_what_was_to_be_written(tmp_path, expected):
    write_tensors({"a": torch.ones(2)}, tmp_path, "1GB")
    reader = CheckpointReader(tmp_path)
    check_written({"a": torch.zeros(2)}, reader)
    with pytest.raises(OSError, match="not in the files as it was written"):
        check_written(expected, reader)


class TestExperts:
    """Tokens that calibration sent to each expert, as the routers of the float model say."""

    NAMES = tuple(f"model.layers.{i}.mlp.experts" for i in (0, 1))

    @pytest.fixture
    def mixture(self, build):
        """A model of experts, the first few of which are chosen, and the choices of its routers."""

        def mixture(chosen=4):
            model = build("mixtral", num_local_experts=4, num_experts_per_tok=2)
            choices = {name: [] for name in self.NAMES}

            def choose(name):
                def hook(router, args, output):
                    choices[name].append(output[2].clamp(max=chosen - 1))
                    return *output[:2], choices[name][-1]

                return hook

            for name, made in choices.items():
                router = model.get_submodule(name.replace("experts", "gate"))
                router.register_forward_hook(choose(name))
                assert made == []
            return model, choices

        return mixture

    @pytest.mark.parametrize(
        ("scheme", "algorithms"),
        [
            ("int8", None),
            ("int8_wo", [GPTQConfig()]),
            ("int8_wo", [GPTQConfig(true_sequential=True)]),
            ("int8", [AWQConfig()]),
            ("ptpc_int8", [SmoothQuantConfig()]),
        ],
        ids=["ranges", "gptq", "gptq in turns", "awq and ranges", "smooth"],
    )
    @pytest.mark.sampled(3)
    def test_counts(self, mixture, quantize, config_of, batches, scheme, algorithms):
        float_model, choices = mixture()
        for batch in batches:
            float_model(batch)
        sent = {n: torch.cat(made).flatten().bincount().tolist() for n, made in choices.items()}
        model, _ = mixture()
        quantize(model, config_of(scheme, algo_config=algorithms))
        assert model.get_submodule(self.NAMES[0]).tokens == sent[self.NAMES[0]]
        last = model.get_submodule(self.NAMES[1]).tokens  # of a block after quantized ones
        assert sum(last) == sum(sent[self.NAMES[1]]) == 2 * sum(b.numel() for b in batches)
        found = expert_tokens(model)
        assert (found.experts, found.least) == (
            8,
            min(model.get_submodule(self.NAMES[0]).tokens + last),
        )

    @pytest.mark.parametrize(
        ("scheme", "algorithms", "has_data"),
        [
            ("int8_wo", [GPTQConfig()], False),
            ("int8", None, False),
            ("int8", [AWQConfig()], True),
        ],
        ids=["gptq", "ranges", "awq and ranges"],
    )
    @pytest.mark.sampled(3)
    def test_statistics_tell_counts_too(
        self, mixture, config_of, batches, scheme, algorithms, has_data
    ):
        float_model, choices = mixture(chosen=3)
        for batch in batches:
            float_model(batch)
        sent = [torch.cat(made).flatten().bincount(minlength=4) for made in choices.values()]
        found = collect_statistics(mixture(chosen=3)[0], batches, probes=0)
        model, _ = mixture(chosen=3)
        quantizer = ModelQuantizer(config_of(scheme, algo_config=algorithms))
        quantizer.quantize_model(model, batches if has_data else None, found)
        assert [model.get_submodule(name).tokens for name in self.NAMES] == [
            counts.tolist() for counts in sent
        ]
        assert expert_tokens(model).unseen == [f"{name}.3" for name in self.NAMES]

    def test_statistics_tell_counts_of_experts_with_merged_weights(self, build, batches, config_of):
        sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = config_of("int8", exclude=("lm_head", "*gate"))
        by_data, by_statistics = build("qwen3_moe", **sizes), build("qwen3_moe", **sizes)
        found = collect_statistics(build("qwen3_moe", **sizes), batches, probes=0)
        ModelQuantizer(config).quantize_model(by_data, batches)
        ModelQuantizer(config).quantize_model(by_statistics, statistics=found)
        assert expert_tokens(by_statistics) == expert_tokens(by_data) is not None

    def test_nothing_is_told_without_data_or_experts(self, mixture, build, quantize):
        assert expert_tokens(quantize(mixture()[0], "int8_wo", None)) is None
        assert expert_tokens(quantize(build(), "int8")) is None

    def test_experts_without_tokens(self, mixture, quantize, export, caplog):
        model = quantize(mixture(chosen=3)[0], "int8")
        found = expert_tokens(model)
        assert found.unseen == [f"{name}.3" for name in self.NAMES] and found.least == 0
        assert "none for 2 of 8" in str(found)
        caplog.clear()
        export(model)
        said = "2 of 8 experts got no token at all in calibration: " + ", ".join(found.unseen)
        assert said in caplog.text

    def test_an_onnx_file_tells_of_them_too(
        self, build, quantize, batches, tmp_path, caplog, onnx_operators
    ):
        sizes = {"num_local_experts": 3, "num_experts_per_tok": 1, "num_hidden_layers": 1}
        model = quantize(build("mixtral", **sizes), "int8_wo", None)
        model.get_submodule(self.NAMES[0]).token_counts = {0: [9, 9, 0]}
        export_onnx(model, tmp_path / "out", batches[0], dynamic_shapes={})
        assert "1 of 3 experts got no token at all in calibration" in caplog.text

    def test_experts_with_few(self, mixture, quantize, export, caplog):
        model = quantize(mixture()[0], "int8")
        model.get_submodule(self.NAMES[0]).token_counts = {0: [40, 41, 3, 4]}
        model.get_submodule(self.NAMES[1]).token_counts = {0: [20, 20, 1, 1], 1: [10, 10, 2, 1]}
        found = expert_tokens(model)
        assert found[1:3] == (2, 17.0)
        assert found.scarce == []
        model.get_submodule(self.NAMES[0]).token_counts = {0: [40, 41, 42, 4]}
        assert expert_tokens(model).scarce == [f"{self.NAMES[0]}.3"]
        export(model)
        assert "1 of 8 experts got less than a tenth" in caplog.text
