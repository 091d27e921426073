"""Groups that do not divide a model: the message names what does."""

from types import SimpleNamespace

import pytest
import typer

from quark.cli.quantize.group_fit import fit_groups
from quark.torch.quantization.config.template import LLMTemplate


@pytest.fixture
def fit(build):
    def fit(scheme, width=96):
        sizes = {"hidden_size": 72, "num_attention_heads": 3, "intermediate_size": width}
        model = build("llama", device="meta", **sizes)
        config = LLMTemplate.get("llama").get_config(scheme=scheme)
        return fit_groups(SimpleNamespace(recipe=None, quant_scheme=scheme), config, model)

    return fit


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("int4_wo_128", "groups of 128 do not .* Give --quant_scheme int4_wo_8, "),
        ("int4_wa_128", "groups of 128 do not .* Give --quant_scheme int4_wa_8, "),
        ("w_int2_per_group_asym", "its groups do not .* Give --group_size 8, "),
    ],
)
def test_groups(fit, scheme, said):
    with pytest.raises(typer.BadParameter, match=said):
        fit(scheme)


def test_without_a_size_for_all_each_kind_has_its_own(fit):
    with pytest.raises(typer.BadParameter) as refusal:
        fit("int4_wo_128", 100)
    said = str(refusal.value)
    assert "No size of groups divides all. Give each kind its own: " in said
    assert "--layer_quant_scheme 'model.layers.*.mlp.down_proj' int4_wo_100" in said
    assert "--layer_quant_scheme 'model.layers.*.self_attn.q_proj' int4_wo_72" in said
    with pytest.raises(typer.BadParameter) as refusal:
        fit("w_int2_per_group_asym", 100)
    assert "--group_size_per_layer 'model.layers.*.mlp.down_proj' 100" in str(refusal.value)


@pytest.mark.parametrize("scheme", ["q4_0", "iq4_nl"])
def test_blocks_of_one_size_have_no_other_to_name(fit, scheme):
    """Quantization refuses them by the name of the layer."""
    assert fit(scheme).layer_quant_config == {}
