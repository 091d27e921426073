"""Words and figures against what is known by hand, and against the bytes that are stored."""

import json

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.checkpoint.writer import collect, make_format
from quark.torch.export.checkpoint_contents import summarize
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.description import LayerDescription, describe, describe_layer
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.kv_cache import with_kv_cache
from quark.torch.quantization.config.presets import kv_cache_scheme, scheme, scheme_names

GROUPED = {"qscheme": "per_group", "ch_axis": -1, "group_size": 32}
TOKEN = {"qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}


def spec(dtype, **fields):
    return QuantizationSpec(dtype, **{"qscheme": "per_tensor", **fields})


@pytest.mark.parametrize(
    ("given", "is_weight", "words"),
    [
        (None, True, ""),
        (spec("uint4", **GROUPED, symmetric=False), True, "uint4 per group 32 asym"),
        (spec("int4", **{**GROUPED, "group_size": -1}), True, "int4 per group row sym"),
        (spec("int8", qscheme="per_channel", ch_axis=0), True, "int8 per channel sym"),
        (spec("int8", is_dynamic=True), True, "int8 per tensor sym"),
        (spec("int8", **TOKEN), False, "int8 per token sym dynamic"),
        (spec("int8", **TOKEN), True, "int8 per channel sym"),
        (spec("fp8_e4m3"), False, "fp8_e4m3 per tensor static"),
        (spec("fp8_e5m2", scale_type="float16"), True, "fp8_e5m2 per tensor (float16 scales)"),
        (QuantizationSpec("bfloat16"), False, "bfloat16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_words(given, is_weight, words):
    assert describe(given, is_weight) == words


def test_words_of_a_layer():
    layer = QuantizationConfig(weight=spec("int8"), output_tensors=spec("fp8_e4m3"))
    words = "fp8_e4m3 per tensor static"
    assert describe_layer(layer) == LayerDescription(weight="int8 per tensor sym", output=words)
    assert describe_layer(layer, True) == LayerDescription(
        weight="int8 per tensor sym", kv_cache=words
    )


class Net(nn.Module):
    """Layers of 96 inputs and 64 outputs beside what is never quantized."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 96)
        self.norm = nn.LayerNorm(96)
        self.blocks = nn.ModuleList(nn.Linear(96, 64) for _ in range(11))
        self.head = nn.Linear(96, 10, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids))), [b(self.embed(ids)) for b in self.blocks]


REST = 10 * 96 + 2 * 96 + 11 * 64 + 10 * 96  # embedding, norm, biases, head


def stored(config, quantize, **options):
    """The tensors of a checkpoint of ``Net``."""
    model = quantize(Net(), config, [torch.arange(10)])
    return collect(model, make_format(model, None, JsonExporterConfig(**options), "quark"))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        # scales and zero points of a group of 32 add 32 bits and one code
        ("int2_wo_32", 2 + 1 + 2 / 32),
        ("int3_wo_32", 3 + 1 + 3 / 32),
        ("int4_wo_32", 4 + 1 + 4 / 32),
        ("uint4_wo_32", 4 + 1 + 4 / 32),
        ("int8_wo_32", 8 + 1 + 8 / 32),
        ("int4_wo_per_channel", 4 + (32 + 4) / 96),
        ("int8_wo", 8 + (32 + 8) / 96),
        ("fp8_wo", 8 + 32 / 96),
        ("fp8", 8 + 32 / (96 * 64)),
        ("int8", 8 + (32 + 8) / (96 * 64)),
        ("bfloat16", 16),
    ],
)
def test_bits_per_weight(name, bits, quantize):
    config = Config(global_quant_config=scheme(name), exclude=["head"])
    summary = summarize(stored(config, quantize), config, "float32")
    assert summary.bits_per_weight == pytest.approx(bits, rel=1e-12)
    assert summary.weights == 11 * 96 * 64


@pytest.mark.parametrize(
    ("name", "bits"), [("int3_wo_32", 3), ("int4_wo_32", 4), ("int8_wo_32", 8)]
)
@pytest.mark.parametrize("outputs", [64, 36])
def test_bits_per_weight_of_turned_weights(name, bits, outputs, quantize):
    config = Config(global_quant_config=scheme(name))
    model = quantize(nn.Sequential(Conv1D(outputs, 1024)), config)
    tensors = collect(model, make_format(model, None, JsonExporterConfig(), "quark"))
    summary = summarize(tensors, config, "float32")
    assert summary.weights == outputs * 1024
    assert summary.bits_per_weight == pytest.approx(bits + 1 + bits / 32)


@pytest.mark.parametrize("name", scheme_names())
@pytest.mark.sampled(3)
def test_totals_are_those_of_the_files(name, quantize):
    config = Config(global_quant_config=scheme(name, 32), exclude=["head"])
    if "128" in name or "_64" in name:
        config.global_quant_config.weight.set_group_size(32)
    tensors = stored(config, quantize)
    summary = summarize(tensors, config, "float32")
    assert [layer.name for layer in summary.layers] == [f"blocks.{i}" for i in range(11)]
    assert summary.parameters == 11 * 96 * 64 + REST
    assert summary.bytes == sum(t.nbytes for t in tensors.values())
    assert summary.bits_per_parameter == 8 * summary.bytes / summary.parameters
    (row,) = summary.schemes()
    assert (row.layers, row.weights) == (11, 11 * 96 * 64)
    assert row.scheme == describe_layer(config.global_quant_config)
    (rest,) = summary.rest
    assert (rest.dtype, rest.parameters, rest.bytes) == ("float32", REST, 4 * REST)


def test_values_are_counted_as_they_are_stored(quantize):
    config = Config(global_quant_config=scheme("int4_wo_32"), exclude=["head"])
    tensors = stored(config, quantize, weight_format="fake_quantized")
    summary = summarize(tensors, config, "float32")
    assert summary.weights == 11 * 96 * 64
    assert summary.bits_per_weight == pytest.approx(32 + 1 + 32 / 32)  # zero points are int32 here


def test_codes_of_two_bits_in_words_of_their_own():
    """Versions before 1.0 stored each of them in 32 bits."""
    config = Config(global_quant_config=scheme("int2_wo_32"))
    sizes = {"weight": (96, 64), "weight_scale": (3, 64), "weight_zero_point": (3, 64)}
    types = {"weight": torch.int32, "weight_scale": torch.float32, "weight_zero_point": torch.int32}
    entries = {f"a.{k}": torch.empty(sizes[k], dtype=types[k], device="meta") for k in sizes}
    summary = summarize(entries, config)
    assert summary.weights == 96 * 64
    assert summary.bits_per_weight == 32 + 2


@pytest.mark.parametrize(
    ("dtype", "layers"), [("float32", 11), ("bfloat16", 0), (None, 11)], ids=str
)
def test_a_cast_to_the_type_of_the_model_is_none(dtype, layers, quantize):
    config = Config(global_quant_config=scheme("bfloat16"), exclude=["head"])
    summary = summarize(stored(config, quantize), config, dtype)
    assert len(summary.layers) == layers
    assert summary.parameters == 11 * 96 * 64 + REST


def test_the_cache_has_a_column_of_its_own(quantize):
    config = Config(global_quant_config=scheme("int8_wo"), exclude=["head", "blocks.1"])
    config = with_kv_cache(config, ["blocks.0", "blocks.1"], "fp8")
    summary = summarize(stored(config, quantize), config, "float32")
    words = describe(kv_cache_scheme("fp8"))
    by_name = {layer.name: layer for layer in summary.layers}
    assert by_name["blocks.0"].scheme == LayerDescription(
        weight="int8 per channel sym", kv_cache=words
    )
    assert by_name["blocks.1"].scheme == LayerDescription(kv_cache=words)
    assert by_name["blocks.1"].weights == by_name["blocks.1"].bits == 0
    assert by_name["blocks.2"].scheme == LayerDescription(weight="int8 per channel sym")
    assert summary.weights == 10 * 96 * 64
    assert summary.parameters == 11 * 96 * 64 + REST
    without_weights = next(s for s in summary.schemes() if not s.weights)
    assert without_weights.bits_per_weight is None


def test_schemes_are_told_apart(quantize):
    config = Config(
        global_quant_config=scheme("int8_wo"),
        layer_quant_config={"blocks.1*": scheme("int4_wo_32")},
        exclude=["head"],
    )
    summary = summarize(stored(config, quantize), config)
    rows = [(row.scheme.weight, row.layers) for row in summary.schemes()]
    assert rows == [("int8 per channel sym", 9), ("int4 per group 32 sym", 2)]


@pytest.mark.parametrize(
    ("linear", "embedding", "words"),
    [
        ("int4_wo_32", "int8_wo_32", "int8 per group 32 sym"),
        ("int8_wo_32", "int8_wo", "int8 per channel sym"),
        ("fp8", "int8_wo_32", "int8 per group 32 sym"),
        ("int8", "int8_wo", "int8 per channel sym"),
    ],
)
def test_layers_that_a_type_selects(linear, embedding, words, quantize):
    """Headers have no types: stored codes and scales tell which of the choices a layer has."""
    config = Config(
        scheme(linear), layer_type_quant_config={nn.Embedding: scheme(embedding)}, exclude=["head"]
    )
    weights = {
        layer.name: layer.scheme.weight
        for layer in summarize(stored(config, quantize), config).layers
    }
    assert weights.pop("embed") == words
    assert set(weights.values()) == {describe(scheme(linear).weight, is_weight=True)}


def test_a_float_model(build):
    model = build("opt")
    summary = summarize(model.state_dict())
    assert summary.layers == ()
    assert summary.bits_per_weight is None
    assert summary.bits_per_parameter == 32
    assert summary.bytes == sum(t.nbytes for t in model.state_dict().values())


def test_nothing_at_all():
    summary = summarize({}, Config(global_quant_config=scheme("fp8")))
    assert (summary.parameters, summary.bytes, summary.bits_per_parameter) == (0, 0, None)


def test_headers_say_the_same_as_tensors(build, quantize, export):
    model = quantize(build(), "uint4_wo_32")
    path = export(model)
    config = model.quant_config
    tensors = collect(model, make_format(model, None, JsonExporterConfig(), "quark"))
    assert summarize(CheckpointReader(path).entries, config) == summarize(tensors, config)


def test_json(quantize):
    config = Config(global_quant_config=scheme("int8_wo"), exclude=["head"])
    summary = summarize(stored(config, quantize), config)
    data = json.loads(json.dumps(summary.to_dict()))
    assert data["bits_per_weight"] == summary.bits_per_weight
    assert data["layers"][10] == {
        "name": "blocks.10",
        "scheme": {"weight": "int8 per channel sym", "input": "", "output": "", "kv_cache": ""},
        "weights": 6144,
        "bits": 64 * (96 * 8 + 32 + 8),
    }
    assert sum(row["layers"] for row in data["schemes"]) == len(data["layers"]) == 11
