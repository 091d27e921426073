"""General names in a configuration become the names of a model."""

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.builder import build_config
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.resolution import (
    add_shared_inputs,
    fused_projections,
    output_head,
    resolve_exclude,
    resolve_names,
    shares_inputs,
)


class Net(nn.Module):
    """Two layers and a head of some name."""

    def __init__(self, head="embed_out", kind=nn.Linear):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.add_module(head, kind(32, 32))
        self.head = head

    def get_output_embeddings(self):
        return getattr(self, self.head)

    def forward(self, x):
        return self.get_output_embeddings()(self.up(x) + self.down(x))


class Heads(nn.ModuleList):
    def __init__(self, *_):
        super().__init__([nn.Linear(32, 32), nn.Linear(32, 32)])


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Net(), ["embed_out"]),
        (Net("lm_head"), ["lm_head"]),
        (Net("heads", Heads), ["heads.0", "heads.1"]),
        (nn.Linear(2, 2), []),
    ],
    ids=["other name", "same name", "several", "none"],
)
def test_output_head(model, names):
    assert output_head(model) == names
    assert resolve_exclude(["lm_head", "a*"], model) == [*(names or ["lm_head"]), "a*"]
    assert resolve_exclude(["a*"], model) == ["a*"]


def test_a_module_called_lm_head_stays_excluded():
    model = Net()
    model.lm_head = nn.Linear(2, 2)
    assert resolve_exclude(["*up", "lm_head"], model) == ["lm_head", "embed_out", "*up"]


def test_a_configuration_without_general_names_is_returned():
    config = Config(scheme("int8_wo"), exclude=["up"], shared_scale_groups=[["up", "down"]])
    assert resolve_names(config, Net()) is config


def test_fused_projections_that_a_model_has():
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("q_proj", "k_proj", "up_proj")})
    config = Config(shared_scale_groups=fused_projections())
    assert shares_inputs(config)
    assert resolve_names(config, model).shared_scale_groups == [["q_proj", "k_proj"]]
    assert not shares_inputs(Config())
    assert not shares_inputs(Config(shared_scale_groups=fused_projections()[:1]))


READ = {  # layers that read each input -> groups of endings
    "blocks": ([["0.q", "0.k"], ["0.o"], ["1.q", "1.k"], ["1.o"]], [["q", "k"]]),
    "named": ([["0.q_proj", "0.k_proj", "0.v_proj"]], []),
    "more": ([["0.q_proj", "0.k_proj", "0.g"]], [["q_proj", "k_proj", "g"]]),
    "cross": (
        [["0.self.q", "0.self.k"], ["0.cross.q"], ["0.cross.k"]],
        [["self.q", "self.k"]],
    ),
    "partly": (
        [["0.self.q", "0.self.k", "0.self.v"], ["0.cross.q"], ["0.cross.k", "0.cross.v"]],
        [["self.q", "self.k", "self.v"], ["k", "v"]],
    ),
    "one block": ([["0.q", "0.k"], ["1.q"], ["1.k"]], [["0.q", "0.k"]]),
    "none": ([["0.q"], ["0.k"]], []),
}


@pytest.mark.parametrize(("read", "endings"), READ.values(), ids=READ)
def test_layers_that_share_an_input(read, endings):
    config = Config(shared_scale_groups=[["q_proj", "k_proj", "v_proj"]])
    given = config.shared_scale_groups
    assert add_shared_inputs(config, read).shared_scale_groups == [*given, *endings]
    assert config.shared_scale_groups == given


def test_a_quantized_model_remembers_its_own_names():
    torch.manual_seed(0)
    model = ModelQuantizer(build_config(scheme("nvfp4_weight_only"))).quantize_model(
        Net(), [torch.randn(2, 32)]
    )
    assert model.quant_config.exclude == ["embed_out"]
    assert model.quant_config.shared_scale_groups == [["up", "down"]]
    assert type(model.embed_out) is nn.Linear
    assert torch.equal(model.up.weight_quantizer.scale_2, model.down.weight_quantizer.scale_2)


def test_a_model_that_takes_no_tokens_needs_data(caplog):
    model = ModelQuantizer(build_config(scheme("nvfp4_weight_only"))).quantize_model(Net())
    assert "Pass a dataloader to find all layers" in caplog.text
    assert model.quant_config.shared_scale_groups == []
