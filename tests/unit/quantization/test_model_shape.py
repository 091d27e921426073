"""Shapes of models without values, against the models themselves."""

import torch

from quark.torch.graph.shared_inputs import same_input_groups
from quark.torch.quantization.model_shape import list_kinds, measure_model


def test_sizes_are_those_of_the_model(build, config_of):
    model = build("llama", num_hidden_layers=3)
    shape = measure_model(model, config_of("int4_wo_32"))
    tensors = [*model.parameters(), *model.buffers()]
    assert shape.size == sum(t.numel() * t.itemsize for t in tensors)
    layer = model.model.layers[0]
    assert len(shape.blocks) == 3
    assert shape.blocks[0].size == sum(4 * p.numel() for p in layer.parameters())
    linear = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    assert shape.blocks[0].elements == sum(m.weight.numel() for m in linear)
    assert shape.around == model.model.embed_tokens.weight.numel() + model.lm_head.weight.numel()


def test_layers_share_the_inputs_that_they_read(build, config_of):
    model = build("llama")
    shape = measure_model(model, config_of("int4_wo_32"))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    read = same_input_groups(model, lambda: model(tokens))
    assert len(shape.blocks[0].layers) == 7
    shared = sum(len(group) - 1 for group in read if ".0." in min(group))
    assert len(shape.blocks[0].input_widths) == 7 - shared == 4


def test_layers_that_round_one_input_differently_have_sums_of_their_own(build, config_of):
    model, config = build("llama"), config_of("mxfp4")
    plain = measure_model(model, config).blocks[0]
    config.layer_quant_config = {
        "*.v_proj": config_of("w_int8_a_int8_per_tensor_sym").global_quant_config
    }
    mixed = measure_model(model, config).blocks[0]
    extra = model.config.hidden_size
    assert sorted(mixed.input_widths) == sorted([*plain.input_widths, extra])
    assert mixed.grams == plain.grams + 4 * extra**2


def test_experts_take_their_part_of_the_tokens(build, config_of):
    model = build("mixtral", num_local_experts=4, num_experts_per_tok=2)
    block = measure_model(model, config_of("int4_wo_32")).blocks[0]
    experts = [layer for layer in block.layers if layer.share != 1]
    assert len(experts) == 3 * 4
    assert {layer.share for layer in experts} == {0.5}
    weights = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() > 1)
    assert block.active == weights - sum(layer.elements for layer in experts) / 2


def test_kinds_say_what_stays_in_float_and_why(build, config_of):
    model = build("mixtral", num_local_experts=4)
    before = [(name, id(m)) for name, m in model.named_modules()]
    kinds = {kind.name: kind for kind in list_kinds(model, config_of("int4_wo_32"))}
    assert [(name, id(m)) for name, m in model.named_modules()] == before
    assert kinds["lm_head"].reason == "excluded by lm_head"
    assert kinds["model.embed_tokens"].reason == "quantized only by name"
    assert "cannot be quantized" in kinds["model.layers.*.mlp.gate"].reason
    down = kinds["model.layers.*.mlp.experts.*.w2"]
    assert (down.number, down.reason) == (4 * model.config.num_hidden_layers, "")
    assert down.config.weight.group_size == 32
