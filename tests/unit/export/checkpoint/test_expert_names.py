"""Experts under the names of other tools: those of the architecture, and those after the stacks."""

import json
import re

import pytest

from quark.torch.export.recognition import load_checkpoint, load_in_float
from tests.configurations import config, groups
from tests.unit.export.formats.gptq_files import set_section, set_tensors

GPTQ = {"bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"}
GPTQ |= {"quant_method": "gptq", "desc_act": False}
AUTO_ROUND = {"bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
AUTO_ROUND |= {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
AFTER_STACKS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
SIZES = {"num_local_experts": 3, "num_experts_per_tok": 2}
INT4, EXCLUDED = groups("int4"), ("lm_head", "*.gate")


def after_stacks(name):
    return re.sub(r"(experts\.\d+\.)(w\d)", lambda m: m[1] + AFTER_STACKS[m[2]], name)


# What stores the experts, and the names of their layers.
NAMES = {
    "architecture": lambda name: name,
    "transformers 5": lambda name: name.replace("block_sparse_moe", "mlp"),
    "gptqmodel": lambda name: after_stacks(name.replace("block_sparse_moe", "mlp")),
    "both": after_stacks,
}


@pytest.fixture
def stored(build, quantize, export):
    """Write a Mixtral under other names, in tensors and in the section; return the model too."""

    def stored(names, configuration, mode, section=None):
        model = quantize(build("mixtral", **SIZES), configuration)
        path = export(model, custom_mode=mode)
        set_tensors(path, lambda tensors: {NAMES[names](n): t for n, t in tensors.items()})
        described = json.loads((path / "config.json").read_text())["quantization_config"]
        text = json.dumps(section or described).replace("mlp", "block_sparse_moe")
        set_section(path, json.loads(NAMES[names](text)))
        return path, model

    return stored


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("section", [GPTQ, AUTO_ROUND], ids=["gptq", "auto-round"])
def test_sections_without_names(stored, logits, names, section):
    path, model = stored(names, config(INT4, exclude=EXCLUDED), "gptq", section)
    for load in (load_checkpoint, load_in_float):
        assert logits(load(path)).equal(logits(model))


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("mode", ["gptq", "awq", "compressed-tensors"])
def test_sections_that_list_layers(stored, logits, names, mode):
    path, model = stored(names, config(INT4, exclude=EXCLUDED), mode)
    assert logits(load_checkpoint(path)).equal(logits(model))


@pytest.mark.parametrize("names", NAMES)
def test_layers_with_other_options(stored, logits, names):
    """A pattern counts that matches a name under which the layer is stored."""
    others = {"*.w2": config(groups("int8")).global_quant_config}
    whole = config(INT4, exclude=EXCLUDED, layer_quant_config=others)
    path, model = stored(names, whole, "compressed-tensors")
    loaded = load_checkpoint(path)
    assert logits(loaded).equal(logits(model))
    w2 = loaded.get_submodule("model.layers.0.mlp.experts.2.w2")
    assert w2.quant_config.weight.scheme.fmt.bits == 8


def test_both_names_at_once(stored):
    path, _ = stored("gptqmodel", config(INT4, exclude=EXCLUDED), "gptq", GPTQ)
    layer = "model.layers.0.mlp.experts.0"

    def add(tensors):
        return tensors | {f"{layer}.w1.scales": tensors[f"{layer}.gate_proj.scales"].clone()}

    set_tensors(path, add)
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj\..* unexpected"):
        load_checkpoint(path)


@pytest.mark.parametrize("part", ["gate.weight", "experts.0.w1.scales"])
def test_a_tensor_under_two_names(stored, part):
    path, _ = stored("architecture", config(INT4, exclude=EXCLUDED), "gptq", GPTQ)
    first, second = (f"model.layers.0.{block}.{part}" for block in ("block_sparse_moe", "mlp"))
    set_tensors(path, lambda tensors: tensors | {second: tensors[first] + 1})
    with pytest.raises(ValueError, match=f"{first} and {second} are the same tensor of the model"):
        load_checkpoint(path)
