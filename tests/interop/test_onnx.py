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
HEADS = ("int8_per_head", "fp4_per_head")


def config(name, **rest):
    group = 128 if name.endswith("_128") else 32
    return Config(scheme(name, group), **{"exclude": ["lm_head"], **rest})


def everywhere(name):
    """Embedding and head as well."""
    weight = scheme(name, 32).weight
    layers = {"*embed_tokens": QuantizationConfig(weight=weight)}
    return Config(scheme(name, 32), layer_quant_config=layers)


def with_caches(name, caches, after_embedding, **rest):
    """One decoder block for each format of the key-value cache."""
    layer = scheme(name, 32)
    layers = {
        f"*layers.{i}.*{projection}": QuantizationConfig(
            weight=layer.weight,
            input_tensors=layer.input_tensors,
            output_tensors=kv_cache_scheme(cache),
        )
        for i, cache in enumerate(caches)
        for projection in ("k_proj", "v_proj")
    }
    return config(
        name,
        layer_quant_config=layers,
        kv_cache_quant_config=layers,
        kv_cache_post_rope=after_embedding,
        **rest,
    )


def rotations(**changes):
    return [RotationConfig(**{"r1": True, "r2": True, "r3": False, "r4": True, **changes})]


# Every projection of one decoder block in its own scheme, so that one graph shows all of them.
WEIGHTS = {
    "*q_proj": "int8_wo",
    "*k_proj": "int4_wo_32",
    "*v_proj": "uint4_wo_128",
    "*o_proj": "fp8_wo",
    "*up_proj": "mxfp4_weight_only",
    "*gate_proj": "int4_wo_128",
}
ACTIVATIONS = {
    "*q_proj": "int8",
    "*k_proj": "w_int8_per_channel_a_int8_per_tensor_sym",
    "*v_proj": "w_uint4_per_group_a_int8_per_tensor",
    "*o_proj": "fp8",
    "*up_proj": "mxfp4",
    "*gate_proj": "mxfp8",
    "*down_proj": "nvfp4",
    "lm_head": "mx6",
}


def by_layer(schemes):
    layers = {
        pattern: scheme(name, 128 if name.endswith("_128") else 32)
        for pattern, name in schemes.items()
    }
    return Config(QuantizationConfig(), layer_quant_config=layers)


class Probed(nn.Module):
    """A model that also returns the outputs of its projections, by name.

    Hooks are attached for one call alone: an export replaces the layers.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        outputs = {}
        layers = {
            name: layer
            for name, layer in self.model.named_modules()
            if name.endswith(("_proj", "c_attn", "c_proj", "c_fc", "fc1", "fc2"))
        }
        handles = [
            layer.register_forward_hook(
                lambda layer, args, output, name=name: outputs.update({name: output})
            )
            for name, layer in layers.items()
        ]
        logits = self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits
        for handle in handles:
            handle.remove()
        return {"logits": logits, **outputs}


@pytest.fixture
def outputs(tmp_path, build, quantize, run_onnx):
    """Outputs of each layer: by the graph and by the model, at sizes other than traced, padded."""

    def outputs(name, configuration, **changes):
        changes = {**WIDE, "num_hidden_layers": 1, **changes} if name != "gpt2" else changes
        model = Probed(quantize(build(name, **changes), configuration))
        ids = torch.ones(1, 4, dtype=torch.int64)
        export_onnx(model, tmp_path / "out", {"input_ids": ids, "attention_mask": ids})
        for shape in ((3, 17), (1, 9)):
            ids, mask = torch.randint(3, 64, shape), torch.ones(shape, dtype=torch.int64)
            mask[0, :4] = 0
            with torch.no_grad():
                expected = model(ids, mask)
            results = run_onnx(tmp_path / "out", ids, mask)
            for layer, result in zip(expected, results, strict=True):
                pair = (x.reshape(*shape, -1)[mask.bool()] for x in (result, expected[layer]))
                yield layer, *pair

    return outputs


@pytest.mark.parametrize(
    ("name", "configuration", "changes"),
    [
        ("tied", by_layer(WEIGHTS), {}),
        ("tied", everywhere("int4_wo_32"), {}),
        ("gpt2", config("int4_wo_signed_32"), {"n_embd": 128, "n_layer": 1, "n_head": 4}),
    ],
    ids=["every kind", "everything in int4", "transposed matrices"],
)
@pytest.mark.sampled(3)
def test_quantized_weights(outputs, name, configuration, changes):
    for layer, result, expected in outputs(name, configuration, **changes):
        torch.testing.assert_close(
            result, expected, rtol=0, atol=1e-4, msg=lambda text, layer=layer: f"{layer}: {text}"
        )


def check_but_for_ties(result, expected, name="logits"):
    """Values halfway between two codes may go to either, and a few tokens see them.

    The runtime rounds biases to multiples of the product of two scales, which layers show.
    """
    difference = result - expected
    assert difference.abs().median() < (1e-5 if name == "logits" else 1e-4), name
    assert difference.square().mean().sqrt() < 0.02 * expected.std(), name


@pytest.mark.parametrize(
    ("name", "configuration", "changes"),
    [
        ("llama", by_layer(ACTIVATIONS), {}),
        ("opt", config("int8"), {}),
        ("llama", config("int8", algo_config=rotations()), {}),
        ("llama", with_caches("int4_wo_32", CACHES, False), {"num_hidden_layers": len(CACHES)}),
        ("llama", with_caches("int4_wo_32", CACHES, True), {"num_hidden_layers": len(CACHES)}),
        ("llama", with_caches("int4_wo_32", HEADS, True), {"num_hidden_layers": len(HEADS)}),
        ("llama", with_caches("int8", ["uint4"], True), {}),
        ("llama", with_caches("int4_wo_32", ["fp8"], True, algo_config=rotations(r3=True)), {}),
    ],
    ids=[
        "every kind",
        "biases",
        "rotated inputs",
        "caches before",
        "caches after",
        "caches per head",
        "cache and inputs",
        "rotated cache",
    ],
)
@pytest.mark.sampled(8)
def test_quantized_activations(outputs, name, configuration, changes):
    for layer, result, expected in outputs(name, configuration, **changes):
        check_but_for_ties(result, expected, layer)


EXPERTS = {
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 3, "head_dim": 16},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp8", "floats"])
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.sampled(6)
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
    ("schemes", "options", "tolerance"),
    [
        (["int4_wo_128"] * 4, {"matmul_nbits": True}, 1e-5),
        (["int8", "ptpc_int8", "fp8", "int8"], {}, 5e-3),
    ],
    ids=["weights", "weights and activations"],
)
@pytest.mark.sampled(2)
def test_perplexity_of_a_trained_model(tmp_path, quantize, run_onnx, schemes, options, tolerance):
    """Each block of the shipped model in a scheme of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_directory())
    windows = token_windows(evaluation_documents()[:40], tokenizer, 128)[:8]
    model = quantize(
        model, by_layer({f"*layers.{i}.*": n for i, n in enumerate(schemes)}), [windows[:4]]
    )
    shapes = {"input_ids": {0: "batch"}}
    export_onnx(model, tmp_path / "out", windows[:1], dynamic_shapes=shapes, **options)
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
    export_onnx(model, tmp_path / "out", ids, dynamic_shapes={})
    check_but_for_ties(run_onnx(tmp_path / "out", ids)[0], model(ids).logits)
