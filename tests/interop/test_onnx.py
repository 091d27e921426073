"""Language models of Transformers as ONNX, run by ONNX Runtime."""

import pytest
import torch
from torch import nn

from quark.demo.text import evaluation_documents, model_directory
from quark.torch import export_onnx
from quark.torch.evaluation.perplexity import perplexity, token_windows
from quark.torch.quantization.config.config import Config, QuantizationConfig, RotationConfig
from quark.torch.quantization.config.presets import kv_cache_scheme, scheme
from quark.torch.quantization.config.spec import QuantizationSpec

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

WIDE = {"hidden_size": 128, "intermediate_size": 256}
CACHES = ("fp8", "uint4", "mxfp4")


def config(name, **rest):
    group = 128 if name.endswith("_128") else 32
    return Config(scheme(name, group), **{"exclude": ["lm_head"], **rest})


def everywhere(name):
    """Embedding and head as well."""
    weight = scheme(name, 32).weight
    layers = {"*embed_tokens": QuantizationConfig(weight=weight)}
    return Config(scheme(name, 32), layer_quant_config=layers)


def with_cache(name, cache, after_embedding, **rest):
    layer = scheme(name, 32)
    layers = {
        pattern: QuantizationConfig(
            weight=layer.weight,
            input_tensors=layer.input_tensors,
            output_tensors=kv_cache_scheme(cache),
        )
        for pattern in ("*k_proj", "*v_proj")
    }
    return config(
        name,
        layer_quant_config=layers,
        kv_cache_quant_config=layers,
        kv_cache_post_rope=after_embedding,
        **rest,
    )


def turned(**rotations):
    return [RotationConfig(**{"r1": True, "r2": True, "r3": False, "r4": True, **rotations})]


WEIGHTS = {
    "int8": ("tied", config("int8_wo")),
    "int4 in groups of 32": ("llama", config("int4_wo_32")),
    "uint4 in groups of 128": ("llama", config("uint4_wo_128")),
    "fp8": ("llama", config("fp8_wo")),
    "mxfp4": ("llama", config("mxfp4_weight_only")),
    "everything in int4": ("tied", everywhere("int4_wo_32")),
    "transposed matrices": ("gpt2", config("int4_wo_32")),
}
ACTIVATIONS = {
    "int8": ("llama", config("int8")),
    "int8 per channel": ("llama", config("w_int8_per_channel_a_int8_per_tensor_sym")),
    "uint4 and int8": ("llama", config("w_uint4_per_group_a_int8_per_tensor")),
    "fp8": ("llama", config("fp8")),
    **{n: ("llama", config(n)) for n in ("mxfp4", "mxfp8", "nvfp4", "mx6")},
    "biases": ("opt", config("int8")),
    "rotated inputs": (
        "llama",
        config("int8", algo_config=turned()),
    ),
    **{
        f"{name} cache {place} rotary embedding": (
            "llama",
            with_cache("int8", name, place == "after"),
        )
        for name in CACHES
        for place in ("before", "after")
    },
    "rotated cache": (
        "llama",
        with_cache("int4_wo_32", "fp8", True, algo_config=turned(r3=True)),
    ),
}


@pytest.fixture
def pairs(tmp_path, build, quantize, run_onnx):
    """Logits of the graph and of the model, at other sizes than it was traced with, and padded."""

    def pairs(name, configuration):
        changes = {"gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4}, "opt": {}}.get(name, WIDE)
        model = quantize(build(name, **changes), configuration)
        ids = torch.ones(1, 4, dtype=torch.int64)
        export_onnx(model, tmp_path / "out", {"input_ids": ids, "attention_mask": ids})
        for shape in ((3, 17), (1, 9)):
            ids, mask = torch.randint(3, 64, shape), torch.ones(shape, dtype=torch.int64)
            mask[0, :4] = 0
            with torch.no_grad():
                expected = model(ids, attention_mask=mask).logits
            yield run_onnx(tmp_path / "out", ids, mask)[0][mask.bool()], expected[mask.bool()]

    return pairs


@pytest.mark.parametrize("case", WEIGHTS)
def test_quantized_weights(pairs, case):
    for found, expected in pairs(*WEIGHTS[case]):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_quantized_activations(pairs, case):
    """Values halfway between two codes may go to either, and a few tokens see them."""
    for found, expected in pairs(*ACTIVATIONS[case]):
        difference = found - expected
        assert difference.abs().median() < 1e-5
        assert difference.square().mean().sqrt() < 0.02 * expected.std()


EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp8", "floats"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(tmp_path, build, quantize, run_onnx, unchanged, name, kind):
    """A few tokens leave experts without any."""
    sizes = {"num_hidden_layers": 1, "num_experts_per_tok": 2, "initializer_range": 0.3}
    exclude = ["lm_head", *(["*experts*"] if kind == "floats" else [])]
    configuration = config("int4_wo_32" if kind == "floats" else kind, exclude=exclude)
    model = quantize(build(name, **sizes, **EXPERTS[name]), configuration)
    with unchanged(model):
        export_onnx(model, tmp_path / "out", torch.randint(3, 64, (2, 12)))
    for shape in ((3, 17), (1, 1)):
        ids = torch.randint(3, 64, shape)
        difference = run_onnx(tmp_path / "out", ids)[0] - model(ids).logits
        assert difference.abs().median() < 1e-5
        assert kind == "fp8" or difference.abs().max() < 1e-4


class Runtime(nn.Module):
    """A graph as a model."""

    def __init__(self, run):
        super().__init__()
        self.run, self.place = run, nn.Parameter(torch.zeros(()))

    def forward(self, input_ids):
        return self.run(input_ids)[0]


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("int8", {}, 2e-3),
        ("int4_wo_128", {"matmul_nbits": True}, 1e-5),
        ("ptpc_int8", {}, 5e-3),
        ("fp8", {}, 5e-3),
    ],
)
def test_perplexity_of_a_trained_model(tmp_path, quantize, run_onnx, name, options, tolerance):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_directory())
    windows = token_windows(evaluation_documents()[:40], tokenizer, 128)[:8]
    model = quantize(model, config(name), [windows[:4]])
    export_onnx(model, tmp_path / "out", windows[:1], **options)
    graph = Runtime(lambda ids: run_onnx(tmp_path / "out", ids))
    expected = perplexity(model, windows)
    assert perplexity(graph, windows) == pytest.approx(expected, rel=tolerance)


@torch.no_grad()
def test_a_layer_that_is_left_in_float_beside_one_of_each_kind(tmp_path, build, quantize, run_onnx):
    dynamic = QuantizationSpec("fp8_e4m3", qscheme="per_tensor", is_dynamic=True)
    layers = {
        "*q_proj": scheme("int4_wo_32", 32),
        "*k_proj": scheme("fp8"),
        "*v_proj": scheme("int8"),
        "*up_proj": QuantizationConfig(weight=scheme("int8").weight, input_tensors=dynamic),
    }
    model = quantize(build(), Config(QuantizationConfig(), layer_quant_config=layers))
    ids = torch.randint(3, 64, (2, 5))
    export_onnx(model, tmp_path / "out", ids)
    found = run_onnx(tmp_path / "out", ids)[0]
    torch.testing.assert_close(found, model(ids).logits, rtol=0, atol=1e-4)
