"""Which modules are replaced, and that nothing is touched where a configuration does not fit."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import MobileBertConfig, MobileBertForMaskedLM

from quark.torch import ModelImporter, ModelQuantizer
from quark.torch.quantization.config.config import (
    Config,
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QuantizationConfig,
    Uint4PerGroupSpec,
)
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.type import QuantFlow
from quark.torch.quantization.nn.operators import QuantLinear
from quark.torch.quantization.preparation import (
    quantized_layers,
    replace_layers,
    restore_layers,
    select_layers,
)

HOOKS = {
    "weight_norm": torch.nn.utils.weight_norm,
    "spectral_norm": torch.nn.utils.spectral_norm,
    "prune": partial(prune.l1_unstructured, name="weight", amount=3),
}
INT8 = QuantizationConfig(weight=Int8PerTensorSpec().to_quantization_spec())
FP8 = QuantizationConfig(weight=FP8E4M3PerTensorSpec().to_quantization_spec())


class Unknown(nn.Module):
    """A module with a weight, of a type that no operator replaces."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, size))


def grouped(group_size):
    spec = Uint4PerGroupSpec(ch_axis=-1, group_size=group_size).to_quantization_spec()
    return Config(QuantizationConfig(weight=spec))


class Shared(nn.Module):
    """One linear layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.again = self.first
        self.last = nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return self.last(self.again(self.first(x)))


class TestPlan:
    def test_names_and_precedence(self, build, unchanged):
        model = build("opt")
        config = Config(
            INT8,
            layer_type_quant_config={nn.Linear: FP8},
            layer_quant_config={"*.0.fc1": INT8},
            exclude=["lm_head", "*self_attn*"],
        )
        with unchanged(model):
            layers = select_layers(model, config)
        assert {n.removeprefix("model.decoder.layers."): c for n, c in layers.items()} == {
            "0.fc1": INT8,
            "0.fc2": FP8,
            "1.fc1": FP8,
            "1.fc2": FP8,
        }

    def test_excluded_cache_layers_keep_their_outputs(self, build, config_of):
        cache = QuantizationConfig(output_tensors=FP8.weight)
        config = config_of("int8", ["*self_attn*"], kv_cache_quant_config={"*k_proj": cache})
        layers = select_layers(build(), config)
        assert layers["model.layers.0.self_attn.k_proj"] == cache
        assert "model.layers.0.self_attn.v_proj" not in layers

    def test_groups_that_divide_and_float_formats_that_pad(self):
        assert set(select_layers(nn.Sequential(nn.Linear(96, 4)), grouped(32))) == {"0"}
        spec = replace(FP8.weight, qscheme="per_group", ch_axis=-1, group_size=64)
        assert set(
            select_layers(nn.Sequential(nn.Linear(96, 4)), Config(QuantizationConfig(weight=spec)))
        )


def offloaded():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].to("meta")
    return model


def with_integers():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    return model


def quantized():
    return ModelQuantizer(Config(INT8)).quantize_model(nn.Sequential(nn.Linear(8, 8)))


def patched():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].forward = lambda x: x
    return model


def linears(*sizes):
    return nn.Sequential(*(nn.Linear(n, 8) for n in sizes))


BAD = {
    "no_supported_layer": (
        lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(8)),
        Config(INT8),
        r"Sequential has no module that can be quantized \(supported: Linear.*\)",
    ),
    "nothing_left": (
        lambda: linears(8, 8),
        Config(INT8, exclude=["*"]),
        "quantizes none of the 2 modules .* set global_quant_config, or check exclude",
    ),
    "nothing_configured": (lambda: linears(8), Config(), "quantizes none of the 1 modules"),
    "already_quantized": (quantized, Config(INT8), "0 is quantized already: load the float model"),
    "group_does_not_divide": (
        lambda: linears(64, 48),
        grouped(32),
        r"1\.weight: group_size=32 does not divide its 48 elements along axis 1\. "
        r"Choose one that does \(16, 8\), or add",
    ),
    "no_common_group_divides": (
        lambda: linears(49),
        grouped(32),
        r"0\.weight: .* Choose one that does \(49\)",
    ),
    "no_such_axis": (
        lambda: linears(8),
        Config(QuantizationConfig(weight=Int8PerChannelSpec(ch_axis=5).to_quantization_spec())),
        r"0\.weight: ch_axis=5 is not an axis .* give one from -2 to 1",
    ),
    "on_the_meta_device": (
        offloaded,
        Config(INT8),
        r"1\.weight is on the meta device .* accelerate must be moved to memory",
    ),
    "integer_weight": (with_integers, Config(INT8), r"0\.weight is torch\.int8; only floats"),
    "replaced_forward": (
        patched,
        Config(INT8),
        "forward of a Linear was replaced .* undo that before quantizing, or exclude",
    ),
    "unsupported_type": (
        lambda: nn.Sequential(nn.Linear(8, 8), Unknown(8)),
        Config(INT8, layer_type_quant_config={Unknown: INT8}),
        "layer_type_quant_config: Unknown cannot be quantized",
    ),
    "softmax": (
        lambda: linears(8),
        Config(INT8, softmax_quant_spec=INT8.weight),
        "softmax_quant_spec: probabilities take a float format",
    ),
    "file_to_file": (
        lambda: linears(8),
        Config(INT8, quant_flow=QuantFlow.file2file),
        "quant_flow=file2file: quantize_model supports standard only",
    ),
}


@pytest.mark.parametrize(("make", "config", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused_before_any_work(make, config, message, unchanged):
    model = make()
    with unchanged(model), pytest.raises(ValueError, match=message):
        ModelQuantizer(config).quantize_model(model)


def test_patterns_that_match_nothing_are_reported(build, caplog):
    config = Config(
        INT8,
        exclude=["lm_haed", "lm_head"],
        layer_quant_config={"*.up_projj": FP8, "*q_proj": FP8},
        kv_cache_quant_config={"*key": QuantizationConfig(output_tensors=FP8.weight)},
        kv_cache_group=["*xyzzy"],
    )
    with caplog.at_level(logging.WARNING, logger="quark"):
        select_layers(build(), config)
    reported = {r.args[1]: r.getMessage() for r in caplog.records if "matches no" in r.message}
    assert set(reported) == {"lm_haed", "*.up_projj", "*key", "*xyzzy"}
    assert reported["lm_haed"].startswith("exclude: ") and "lm_head" in reported["lm_haed"]
    assert "layer_quant_config: " in reported["*.up_projj"]
    assert "Nearest: up_proj," in reported["*.up_projj"]
    assert "model.embed_tokens" in reported["*xyzzy"]  # nothing is near: some of what there is


def test_a_configuration_that_fits_reports_nothing(build, caplog):
    with caplog.at_level(logging.WARNING, logger="quark"):
        select_layers(
            build(), Config(INT8, exclude=["lm_head"], layer_quant_config={"*q_proj": FP8})
        )
    assert not caplog.records


def test_large_modules_that_stay_in_float_are_reported(caplog):
    model = nn.Sequential(nn.Linear(8, 8), Unknown(64))
    with caplog.at_level(logging.WARNING, logger="quark"):
        select_layers(model, Config(INT8))
    assert "1 (Unknown)" in caplog.text and "98 %" in caplog.text


class TestPrepareAndRestore:
    def test_classes_change_in_place_and_back(self, build, logits, unchanged):
        model = build("opt")
        before = logits(model)
        layer = model.model.decoder.layers[0].fc1
        with unchanged(model):
            replace_layers(model, select_layers(model, Config(INT8)))
            assert model.model.decoder.layers[0].fc1 is layer
            assert type(layer) is QuantLinear and isinstance(layer, nn.Linear)
            assert layer.weight_quantizer is not None and layer.input_quantizer is None
            restore_layers(model)
        assert torch.equal(logits(model), before)

    def test_a_module_under_two_names_is_quantized_once(self):
        torch.manual_seed(0)
        model, x = Shared(), torch.randn(4, 32)
        before = model(x)
        ModelQuantizer(Config(INT8)).quantize_model(model)
        assert [name for name, _ in quantized_layers(model)] == ["first", "last"]
        assert model.again is model.first and type(model.again) is QuantLinear
        weight = model.first.weight.detach().clone()
        ModelQuantizer.freeze(model)
        expected = torch.fake_quantize_per_tensor_affine(
            weight, weight.abs().max().item() / 127.5, 0, -128, 127
        )
        assert torch.equal(model.again.weight, expected)
        assert not torch.equal(model(x), before)

    def test_a_subclass_of_linear_that_computes_something_else_is_left_alone(self):
        class Special(nn.Linear):
            def forward(self, x):
                return super().forward(x).relu()

        model = nn.Sequential(Special(8, 8), nn.Linear(8, 8))
        assert set(select_layers(model, Config(INT8))) == {"1"}
        config = Config(INT8, exclude=["1"])
        with pytest.raises(ValueError, match=r"Modules of Special stay in float: the forward"):
            select_layers(model, config)

    @pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
    @pytest.mark.parametrize("inputs", [None, Int8PerTensorSpec().to_quantization_spec()])
    def test_a_weight_that_a_hook_computes_is_left_alone(self, hook, inputs, export, caplog):
        def make():
            torch.manual_seed(0)
            return nn.Sequential(hook(nn.Linear(8, 8)), nn.Linear(8, 8)).eval()

        model, x = make(), torch.randn(4, 8)
        config = Config(replace(INT8, input_tensors=inputs))
        first = model[0](x)
        model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, [x]))
        assert "0 is left in float: a hook computes the weight" in caplog.text
        assert type(model[0]) is nn.Linear and isinstance(model[1], QuantLinear)
        assert torch.equal(model[0](x), first)
        loaded = ModelImporter(export(model)).import_model_info(make())
        assert torch.equal(loaded(x), model(x))

    @pytest.mark.parametrize("name", ["fp8", "int8", "int4_wo_32"])
    def test_a_weight_without_elements_is_left_alone(self, name, export, caplog):
        """The head of MobileBERT has no outputs where hidden states are as wide as embeddings."""

        def make():
            torch.manual_seed(0)
            width = dict.fromkeys(["hidden_size", "embedding_size", "intra_bottleneck_size"], 32)
            sizes = {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64}
            config = MobileBertConfig(**width, **sizes, use_bottleneck=False)
            return MobileBertForMaskedLM(config).eval()

        model, ids = make(), torch.arange(12)[None]
        expected = model(ids).logits
        config = Config(scheme(name))
        model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, [ids]))
        assert "cls.predictions.dense is left in float: the weight has no ele" in caplog.text
        assert type(model.cls.predictions.dense) is nn.Linear
        logits = model(ids).logits
        assert 0 < (logits - expected).norm() < 0.2 * expected.norm()
        loaded = ModelImporter(export(model)).import_model_info(make())
        assert torch.equal(loaded(ids).logits, logits)

    def test_a_subclass_of_linear_that_computes_the_same_is_quantized(self, build, logits):
        model = build("falcon", bias=True)
        layers = [f"transformer.h.{n}.mlp.dense_4h_to_h" for n in range(2)]
        selected = select_layers(model, Config(INT8))
        assert set(layers) < set(selected)
        before, layer = logits(model), model.get_submodule(layers[0])
        kind = type(layer)
        assert kind.__name__ == "FalconLinear"
        replace_layers(model, selected)
        assert type(layer) is QuantLinear
        restore_layers(model)
        assert type(layer) is kind and torch.equal(logits(model), before)
        by_type = Config(layer_type_quant_config={kind: INT8})
        with pytest.raises(
            ValueError, match=r"FalconLinear is quantized as Linear: give nn.Linear"
        ):
            select_layers(model, by_type)

    def test_modules_that_accelerate_placed(self, build, logits, quantize, config_of):
        from accelerate import dispatch_model

        plain = quantize(build(), "fp8")
        placed = dispatch_model(build(), {"": "cpu"}, force_hooks=True)
        assert hasattr(placed.model.layers[0].mlp.up_proj, "_old_forward")
        assert torch.equal(logits(quantize(placed, "fp8")), logits(plain))

    def test_a_model_that_accelerate_offloaded(self, build, config_of, unchanged):
        from accelerate import cpu_offload

        model = build()
        cpu_offload(model, execution_device=torch.device("cpu"))
        with pytest.raises(ValueError, match=r"q_proj\.weight is on the meta device"):
            ModelQuantizer(config_of("int8")).quantize_model(model, [torch.ones(1, 4).long()])
        assert type(model.model.layers[0].mlp.up_proj) is nn.Linear

    def test_quantizers_of_the_tensors_that_are_configured(self):
        per_channel = FP8E4M3PerChannelSpec(ch_axis=0).to_quantization_spec()
        layer = QuantizationConfig(FP8.weight, None, per_channel, INT8.weight)
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4, bias=False))
        replace_layers(model, select_layers(model, Config(layer)))
        assert set(model[0].quantizers()) == {"input_tensors", "weight", "bias"}
        assert set(model[1].quantizers()) == {"input_tensors", "weight"}


class Shifted(nn.Embedding):
    """An embedding that is no operator, as some architectures have one."""


def test_tied_parameters_count_once_where_modules_stay_in_float(caplog):
    model = nn.ModuleDict({name: Shifted(8, 8) for name in ("encoder", "decoder", "shared")})
    model["encoder"].weight = model["decoder"].weight = model["shared"].weight
    model["layer"] = nn.Linear(8, 8, bias=False)
    select_layers(model, Config(INT8))
    assert "50 % of the parameters stay in float: 1 modules such as encoder" in caplog.text
