"""Checkpoints of AMD Quark 0.13 in every scheme; see ``tests/data/README.md``.

Each loads with the logits of the frozen model of AMD Quark, in Quark and through Transformers, or
is refused with the reason. On the processor that computed them the logits are equal, but for scales
in e4m3, which AMD Quark rounds three times (2e-6). Others add up in another order, which moves
logits by less than 1e-4, unless an input lies halfway between two codes.
"""

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import LLMTemplate, ModelImporter, ModelQuantizer

ARCHIVE = Path(__file__).parents[1] / "data" / "amd_quark.tar.xz"
with tarfile.open(ARCHIVE) as _archive:
    INDEX = json.load(_archive.extractfile("index.json"))
CASES = [name for name, entry in INDEX.items() if "error" not in entry]

# Case, or part of its name -> why it is refused.
REFUSED = {
    "scheme_amdfp4_global": "input_tensors|stored modulo 256",
    "w_fp4_two_level_e5m3": "stored modulo 256",
    "w_uint4_float_zeros": "fractions are lost",
    "w_mxfp4_dynamic": "stored before it was quantized",
    "a_uint8_symmetric": "all negative values became 0",
    "a_uint8_tokens": "all negative values became 0",
    "a_fp8_axis": "only ch_axis=1 is a scale for each token",
    "embedding": r"embed_tokens\.weight(_quantizer\.|_)scale is missing",
    # AMD Quark gives these a scale of 1, under which every weight becomes 0.
    "w_int16_per_channel": r"scale is torch.float32 \[\], expected torch.float32 \[64\]",
    "w_int16_per_group": r"scale is torch.float32 \[\], expected torch.float32 \[64, 2\]",
    "values_scheme_nvfp4": r"input_scale_2.* missing",
}
# Transformers loads these layouts without this package: it lacks a package, or leaves fp8 as it is.
LOADED_BY_TRANSFORMERS = "custom_"


def refusal(case):
    """Return why a case is refused, or None; values hold what codes lose."""
    for part, reason in REFUSED.items():
        if case.startswith(part) or (part in case and not case.startswith("values_")):
            return reason
    return None


TOLERANCE = 1e-4  # of logits, under another order of sums
MOST_UNSTABLE = 0.25  # share of positions with an input at a tie
ROUNDINGS = 16  # that are tried to find such positions
# Its logits were computed before its export merged the scales of keys and values.
UNMERGED = "scheme_fp8_attention_fp8"
LOADED = [case for case in CASES if refusal(case) is None and case != UNMERGED]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    path = tmp_path_factory.mktemp("amd_quark")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(path, filter="data")
    return path


@pytest.fixture(scope="module")
def agrees(checkpoints):
    ids = load_file(checkpoints / "inputs.safetensors")["input_ids"]

    def agrees(model, case):
        expected = load_file(checkpoints / f"{case}.logits")["logits"]
        with torch.no_grad():
            differs = (model(ids).logits.float() - expected).abs().amax(-1) > TOLERANCE
        assert differs.float().mean() <= MOST_UNSTABLE
        assert not differs.any() or not (differs & ~unstable(model, ids)).any()

    return agrees


def unstable(model, ids):
    """Whether other roundings of embeddings move the logits of positions: inputs at ties do."""
    embed = model.get_input_embeddings()
    found = torch.zeros(ids.shape, dtype=torch.bool)
    with torch.no_grad():
        logits = model(ids).logits.float()
        for seed in range(ROUNDINGS):
            noise = 1 + 2e-7 * torch.randn(
                *ids.shape, embed.weight.shape[-1], generator=torch.Generator().manual_seed(seed)
            )
            hook = embed.register_forward_hook(lambda module, args, output, n=noise: output * n)
            found |= (model(ids).logits.float() - logits).abs().amax(-1) > TOLERANCE
            hook.remove()
    return found


def through_importer(path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return ModelImporter(path, "safetensors").import_model_info(model)


def through_transformers(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


def test_every_scheme_is_in_the_archive():
    assert len(CASES) > 200 and len(LOADED) > 180
    assert [n for n, e in INDEX.items() if "error" in e] == []
    assert all(any(refusal(case) == reason for case in CASES) for reason in REFUSED.values())


@pytest.mark.parametrize("case", LOADED)
class TestLoaded:
    @pytest.mark.sampled(4)
    def test_importer(self, checkpoints, agrees, case):
        agrees(through_importer(checkpoints / case), case)

    @pytest.mark.sampled(4)
    def test_transformers(self, checkpoints, agrees, case):
        if case.startswith(LOADED_BY_TRANSFORMERS):
            pytest.skip("Transformers loads this layout without this package")
        agrees(through_transformers(checkpoints / case), case)


def quantized_here(**options):
    """Return the model of the archive, quantized by this package on the same data."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 32,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).eval()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, 32, (1, 12), generator=generator) for _ in range(3)]
    template = LLMTemplate.get("llama")
    config = template.get_config("fp8", kv_cache_scheme="fp8", attention_scheme="fp8")
    quantizer = ModelQuantizer(replace(config, **options))
    return quantizer.freeze(quantizer.quantize_model(model, batches))


def test_quantized_attention(checkpoints, agrees):
    """The frozen model of AMD Quark, and its checkpoint with merged scales."""
    agrees(quantized_here(kv_cache_group=["*k_proj"]), UNMERGED)
    ids = load_file(checkpoints / "inputs.safetensors")["input_ids"]
    for load in (through_importer, through_transformers):
        with torch.no_grad():
            found, expected = (
                m(ids).logits for m in (load(checkpoints / UNMERGED), quantized_here())
            )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("load", [through_importer, through_transformers])
@pytest.mark.parametrize("case", [case for case in CASES if refusal(case) is not None])
def test_refused(checkpoints, case, load):
    with pytest.raises(ValueError, match=refusal(case)):
        load(checkpoints / case)
