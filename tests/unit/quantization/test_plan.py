"""The steps that prepare a model: each leaves the float model when its state is restored."""

from dataclasses import replace

import pytest

from quark.torch.graph.quantized_mark import MARK
from quark.torch.pipeline.model_state import ModelState, restored_on_failure
from quark.torch.quantization.checks import check, discover_structure
from quark.torch.quantization.config.algo import SmoothQuantConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.attention import AttentionRoute
from quark.torch.quantization.nn.linear_experts import LinearExperts
from quark.torch.quantization.nn.probabilities import probability_quantizers
from quark.torch.quantization.plan import PREPARATIONS, prepare
from quark.torch.quantization.preparation import quantized_layers
from tests.models.architectures import build, small_config, tokens


@pytest.fixture
def model():
    """A model with experts and keys, whose attention uses the interface of Transformers."""
    return build(small_config("mixtral"))


@pytest.fixture
def config():
    """Experts and keys are quantized, and an algorithm needs the structure of the model."""
    layer = scheme("fp8")
    return Config(
        layer,
        exclude=["lm_head"],
        kv_cache_quant_config={"*k_proj": replace(layer, output_tensors=layer.input_tensors)},
        kv_cache_post_rope=True,
        softmax_quant_spec=layer.input_tensors,
        algo_config=[SmoothQuantConfig()],
    )


def traces(model):
    """Which preparations a model shows."""
    return (
        hasattr(model.config, MARK),
        any(isinstance(module, LinearExperts) for module in model.modules()),
        any(True for _ in quantized_layers(model)),
        any(isinstance(getattr(m, "config", None), AttentionRoute) for m in model.modules()),
        any(True for _ in probability_quantizers(model)),
    )


def test_checks_and_discovery_leave_the_model(model, config, unchanged):
    with unchanged(model):
        plan = check(model, config, [tokens()], None)
        assert plan.layers and plan.projections and plan.algorithms
        structure = discover_structure(model, plan)
    assert any(".experts.0." in name for name in plan.layers)
    assert any(".experts.0." in e.parameter for g in structure.groups for e in g.edits)


@pytest.mark.parametrize("steps", range(len(PREPARATIONS) + 1))
def test_preparations_are_undone(model, config, unchanged, steps):
    plan = check(model, config, [tokens()], None)
    with unchanged(model):
        state = ModelState(model)
        for step in PREPARATIONS[:steps]:
            step(model, plan)
        assert traces(model) == tuple(i < steps for i in range(len(PREPARATIONS)))
        state.restore()


def test_a_step_that_fails_is_undone(model, config, unchanged):
    plan = check(model, config, [tokens()], None)
    last = model.model.layers[-1].self_attn.o_proj
    last.forward = last.forward  # replaced on the instance, which a change of class does not reach
    with (
        unchanged(model),
        pytest.raises(ValueError, match="was replaced"),
        restored_on_failure(model),
    ):
        prepare(model, plan)
