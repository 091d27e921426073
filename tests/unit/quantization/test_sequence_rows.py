"""Models of which a sequence has several rows of a batch: their batches stay whole."""

import pytest
import torch
from transformers import MusicgenDecoderConfig, MusicgenForCausalLM

from quark.torch import LLMTemplate, ModelQuantizer, collect_statistics
from quark.torch.pipeline.chunks import Chunks
from quark.torch.quantization.sequence_rows import keep_rows_together, rows_of_sequence
from tests.models.architectures import build, small_config

CODEBOOKS = 2
CODES = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))


def musicgen(device="cpu"):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64}
    torch.manual_seed(0)
    with torch.device(device):
        config = MusicgenDecoderConfig(vocab_size=32, num_codebooks=CODEBOOKS, **sizes)
        return MusicgenForCausalLM(config).eval()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_are_counted_without_values(device):
    assert rows_of_sequence(musicgen(device), {"input_ids": CODES}) == CODEBOOKS


def test_other_models_have_a_row_for_a_sequence():
    model = build(small_config("llama"), torch.float32)
    batches = [CODES, {"input_ids": CODES}]
    assert [rows_of_sequence(model, batch) for batch in batches] == [1, 1]
    assert keep_rows_together(model, batches) is batches


def test_batches_stay_whole():
    chunks = list(Chunks(keep_rows_together(musicgen(), [CODES, {"input_ids": CODES[:2]}])))
    assert len(chunks) == 2
    assert torch.equal(chunks[0][0], CODES)
    assert torch.equal(chunks[1]["input_ids"], CODES[:2])


@pytest.mark.parametrize("algorithm", ["gptq", "yaqa", "autoround"])
def test_algorithms_run(algorithm):
    model, before = musicgen(), musicgen()
    config = LLMTemplate.get("musicgen_decoder").get_config("int4_wo_32", algorithm=[algorithm])
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, [CODES]))
    with torch.no_grad():
        logits, original = (m(CODES).logits for m in (model, before))
    assert logits.shape == (4, 8, 32)
    assert 0 < (logits - original).norm() < original.norm()


def test_gptq_loses_less_than_rounding():
    """The oracle is the error of the first layer on its own inputs, which GPTQ lowers."""
    data = [torch.randint(0, 32, (16, 32), generator=torch.Generator().manual_seed(1))]
    inputs, name = [], "model.decoder.layers.0.fc1"
    float_model = musicgen()
    float_model.get_submodule(name).register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    with torch.no_grad():
        float_model(data[0])
    weight, errors = float_model.get_submodule(name).weight, []
    for algorithm in (None, ["gptq"]):
        config = LLMTemplate.get("musicgen_decoder").get_config("int4_wo_32", algorithm=algorithm)
        model = ModelQuantizer(config).quantize_model(musicgen(), data)
        rounded = ModelQuantizer.freeze(model).get_submodule(name).weight
        errors.append((inputs[0] @ (rounded - weight).T).norm())
    assert errors[1] < errors[0]


def test_statistics_are_collected():
    statistics = collect_statistics(musicgen(), [CODES])
    layers = [name for name in statistics.tokens if name.endswith("fc1")]
    assert layers
    assert all(int(statistics.tokens[name]) == CODES.numel() // CODEBOOKS for name in layers)


def test_a_part_of_a_sequence_is_refused(unchanged):
    model = musicgen()
    config = LLMTemplate.get("musicgen_decoder").get_config("int8_wo", algorithm=["gptq"])
    said = "Batch 1 of the dataloader has 3 rows, but a sequence of MusicgenForCausalLM has 2"
    with unchanged(model), pytest.raises(ValueError, match=said):
        ModelQuantizer(config).quantize_model(model, [CODES, CODES[:3]])
