"""Decoders with a cache: the graph generates the tokens that ``generate`` does."""

import pytest
import torch

from quark.torch import ModelExporter
from quark.torch.export.onnx.runtime import OnnxSession
from quark.torch.quantization.config.config import QuantizationConfig
from tests.configurations import preset, quantized, spec
from tests.models.architectures import build as build_architecture
from tests.models.architectures import small_config

PROMPT = torch.tensor([[5, 9, 2, 40, 11, 7, 33], [3, 8, 60, 12, 1, 22, 4]])
NEW = 9
FP8 = QuantizationConfig(output_tensors=spec("fp8_e4m3"))
CACHE = {"kv_cache_quant_config": {"*k_proj": FP8, "*v_proj": FP8}}
CASES = {
    "llama": ("llama", "int4_wo_32", {}),
    "keys before rotary embedding": ("llama", "int8_wo", CACHE),
    "keys after rotary embedding": ("llama", "int8_wo", {**CACHE, "kv_cache_post_rope": True}),
    "queries after rotary embedding": (
        "llama",
        "int8_wo",
        {**CACHE, "kv_cache_post_rope": True, "query_quant_config": {"*q_proj": FP8}},
    ),
    "quantized attention": ("llama", "int8_wo", {**CACHE, "softmax_quant_spec": spec("fp8_e4m3")}),
    "sliding windows": ("gemma3_text", "int4_wo_32", {}),
    "opt": ("opt", "int8_wo", {}),
}


@pytest.fixture
def written(build, tmp_path):
    """Write a quantized model with a cache, verify it; return it and a session."""
    pytest.importorskip("onnxruntime")

    def written(name, scheme="int4_wo_32", rest=None):
        if name == "gemma3_text":  # windows of 4 tokens
            model = build_architecture(small_config(name, sliding_window=4), torch.float32)
        else:
            model = build(name, num_hidden_layers=2)
        model = quantized(model, preset(scheme, **(rest or {})), [PROMPT])
        inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
        exporter = ModelExporter(tmp_path / "out", verify=True)
        exporter.export_onnx_model(model, inputs, use_cache=True)
        return model, OnnxSession(tmp_path / "out" / "quark_model.onnx")

    return written


def generate(session, ids, layers, heads, size):
    """Generate greedily: the prompt without earlier tokens, then each token with its cache."""
    assert session.inputs[:2] == ["input_ids", "attention_mask"]
    past = [torch.zeros(len(ids), heads, 0, size)] * (2 * layers)
    tokens = ids
    for _ in range(NEW):
        logits, *past = session.run(tokens, torch.ones_like(ids), *past)
        tokens = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, tokens], 1)
    return ids


def check_names(session):
    inputs = {i.name: i.shape for i in session.get_inputs()}
    past = ["batch", 2, "past_sequence", 16]
    assert inputs == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "total_sequence"],
        **{f"past_key_values.{i}.{part}": past for i in range(2) for part in ("key", "value")},
    }
    outputs = [output.name for output in session.get_outputs()]
    parts = [f"present.{i}.{part}" for i in range(2) for part in ("key", "value")]
    assert outputs == ["logits", *parts]


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=pytest.mark.nightly if n != "llama" else ()) for n in CASES]
)
def test_the_same_tokens_as_generate(written, case):
    name, scheme, rest = CASES[case]
    model, session = written(name, scheme, rest)
    model.generation_config.eos_token_id = None
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for prompt in (PROMPT, PROMPT[:1, :3]):
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert expected.shape[1] == prompt.shape[1] + NEW
        result = generate(session, prompt, config.num_hidden_layers, heads, size)
        assert torch.equal(result, expected)
    if case == "llama":
        check_names(session._session)


@pytest.mark.parametrize(
    ("name", "inputs", "said"),
    [
        ("llama", {"input_ids": PROMPT[:, :4]}, r"at least 5 tokens, got \[2, 4\]"),
        ("llama", {"inputs_embeds": torch.randn(2, 8, 64)}, "at least 5 tokens, got None"),
        ("mamba2", {"input_ids": PROMPT}, "does not keep keys and values of all earlier tokens"),
    ],
)
def test_what_has_no_such_cache(tmp_path, name, inputs, said, unchanged):
    model = build_architecture(small_config(name), torch.float32)
    model = quantized(model, preset("int8_wo", exclude=["*head*"]))
    with unchanged(model), pytest.raises(ValueError, match=said):
        ModelExporter(tmp_path / "out").export_onnx_model(model, inputs, use_cache=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_positions_behind_padding(tmp_path, build):
    """Positions are an input where prompts have padding in front; the export verifies them."""
    pytest.importorskip("onnxruntime")
    model = quantized(build(num_hidden_layers=2), preset("int8_wo"))
    mask = torch.ones_like(PROMPT)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": PROMPT, "attention_mask": mask, "position_ids": positions}
    exporter = ModelExporter(tmp_path / "out", verify=True)
    exporter.export_onnx_model(model, inputs, use_cache=True)
    session = OnnxSession(tmp_path / "out" / "quark_model.onnx")
    assert session.inputs[:3] == [*inputs]
    past = [torch.zeros(2, 2, 0, 16)] * 4
    logits, *_ = session.run(PROMPT, mask, positions, *past)
    with torch.no_grad():
        expected = model(**inputs).logits
    assert torch.allclose(logits[:, -1], expected[:, -1], atol=1e-3)
