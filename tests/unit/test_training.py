"""Training with the tools of PyTorch and Transformers, and the functions for it."""

import copy

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization.config.config import (
    Config,
    GPTQConfig,
    QATSpec,
    QuantizationConfig,
    QuantizationSpec,
    TQTSpec,
)
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.graph_mode.edges import edge_quantizers
from quark.torch.quantization.preparation import quantized_layers
from quark.torch.training import (
    follow_ranges,
    freeze_batch_norm,
    freeze_ranges,
    range_parameters,
    unfreeze,
)
from tests.unit.quantization.graph_mode.networks import export, graph_config, images, network

TENSOR = {"qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
IDS = torch.randint(3, 64, (8, 16), generator=torch.Generator().manual_seed(4))


def learned(qat_spec):
    tensor = QuantizationSpec("int8", **TENSOR, qat_spec=qat_spec)
    return Config(QuantizationConfig(weight=tensor, input_tensors=tensor), exclude=["lm_head"])


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU6(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )


def conv_config():
    tensor = QuantizationSpec("int8", **TENSOR)
    rows = QuantizationSpec("int4", qscheme="per_channel", ch_axis=0, symmetric=True)
    return Config(QuantizationConfig(weight=rows, input_tensors=tensor, output_tensors=tensor))


IMAGES = torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(6))
LABELS = torch.arange(16) % 5


def conv_model():
    return ModelQuantizer(conv_config()).quantize_model(conv_net().eval(), [IMAGES]).train()


def fit(model, loss, steps=20, lr=1e-2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def image_loss(model):
    return nn.functional.cross_entropy(model(IMAGES), LABELS)


def language_loss(model):
    return model(IDS, labels=IDS).loss


class TestConvolutions:
    def test_in_place_activations_and_a_batch_norm(self):
        model = conv_model()
        losses = fit(model, image_loss, 40)
        assert losses[-1] < 0.6 * losses[0]
        expected = model.eval()(IMAGES).detach()
        assert torch.equal(ModelQuantizer.freeze(model)(IMAGES), expected)

    def test_batch_norms_keep_their_statistics(self):
        model = conv_model()
        fit(model, image_loss, 2)
        norm = model[1]
        before = copy.deepcopy(norm.state_dict())
        freeze_batch_norm(model)
        freeze_batch_norm(model)
        assert len(norm._forward_pre_hooks) == 1
        again = copy.deepcopy(model)
        for each in (model, again):
            fit(each.train(), image_loss, 2)
            for name, value in each[1].state_dict().items():
                assert torch.equal(value, before[name]) == (name not in ("weight", "bias"))
        x = torch.randn(4, 8, 6, 6)
        with torch.no_grad():
            assert torch.equal(norm.train()(x), norm.eval()(x))

    def test_averages_of_the_model(self):
        """EMA copies compute what a model with the averaged parameters computes."""
        model = conv_model()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(3):
            fit(model, image_loss, 2)
            averaged.update_parameters(model)
        ema = averaged.module.eval()
        expected = copy.deepcopy(model).eval()
        expected.load_state_dict(ema.state_dict())
        assert torch.equal(ema(IMAGES), expected(IMAGES))
        assert not torch.equal(ema[0].weight, model[0].weight)
        ModelQuantizer.freeze(ema)
        assert torch.isfinite(ema(IMAGES)).all()


class TestRanges:
    def test_they_stay_after_freeze_ranges(self, build, batches):
        model = ModelQuantizer(Config(scheme("int8"), exclude=["lm_head"])).quantize_model(
            build(), batches
        )
        fit(model.train(), language_loss, 2)
        freeze_ranges(model)
        before = {k: v.clone() for k, v in model.state_dict().items() if k.endswith("scale")}
        losses = fit(model, language_loss, 3)
        after = model.state_dict()
        assert before and all(torch.equal(after[k], v) for k, v in before.items())
        assert losses[-1] < losses[0]
        follow_ranges(model, averaging_constant=0.5)
        fit(model, language_loss, 1)
        after = model.state_dict()
        assert not any(torch.equal(after[k], v) for k, v in before.items() if "input" in k)

    @pytest.mark.parametrize("kind", ["int8", "lsq"])
    def test_they_stay_before_the_first_step_and_in_a_checkpoint(self, build, batches, kind):
        config = learned(QATSpec()) if kind == "lsq" else Config(scheme(kind), exclude=["lm_head"])
        model = ModelQuantizer(config).quantize_model(build(), batches)
        other = copy.deepcopy(model)
        freeze_ranges(model)
        before = copy.deepcopy(model.state_dict())
        other.load_state_dict(before)
        for each in (model, other):
            fit(each.train(), language_loss, 2)
            ranges = {k for k in before if "quantizer" in k}
            assert all(torch.equal(each.state_dict()[k], before[k]) for k in ranges)

    def test_ranges_of_activations_follow_for_some_steps(self):
        model = conv_model()
        follow_ranges(model, steps=2, averaging_constant=0.5)
        scales = []
        for _ in range(4):
            fit(model, lambda m: m(3 * IMAGES).square().mean(), 1)
            scales.append(model[0].input_quantizer.scale.item())
        assert scales[0] < scales[1] == scales[2] == scales[3]
        assert model[0].weight_quantizer.updates == 4

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"steps": 0}, "steps=0: give a positive"),
            ({"averaging_constant": 0.0}, "averaging_constant=0.0"),
            ({"averaging_constant": 1.5}, "averaging_constant=1.5"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            follow_ranges(conv_model(), **options)

    def test_models_without_layers_that_train(self):
        for model in (conv_net(), ModelQuantizer.freeze(conv_model().eval())):
            for function in (follow_ranges, freeze_ranges):
                with pytest.raises(ValueError, match="No layer can train"):
                    function(model)

    @pytest.mark.parametrize("qat_spec", [QATSpec(), TQTSpec()])
    def test_trained_ranges_in_a_group_of_the_optimizer(self, build, qat_spec):
        model = ModelQuantizer(learned(qat_spec)).quantize_model(build(), None)
        ranges = range_parameters(model)
        assert len(ranges) == 2 * 7 * 2  # weight and input of seven layers in two blocks
        with pytest.raises(ValueError, match="have no value"):
            freeze_ranges(model)
        fit(model.train(), language_loss, 2)
        freeze_ranges(model)
        before = [p.detach().clone() for p in ranges]
        fit(model, language_loss, 2)
        assert all(map(torch.equal, ranges, before))
        follow_ranges(model)
        fit(model, language_loss, 2)
        assert not any(map(torch.equal, ranges, before))


class TestFrozenLayers:
    def test_training_goes_on_from_rounded_weights(self, build, batches):
        config = Config(scheme("int4_wo_32"), exclude=["lm_head"], algo_config=[GPTQConfig()])
        model = ModelQuantizer(config).quantize_model(build(), batches)
        expected = model(IDS).logits.detach()
        weight = model.model.layers[0].mlp.up_proj.weight
        assert not weight.requires_grad  # it would leave its codes
        unfreeze(model)
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-4, rtol=1e-4)
        losses = fit(model.train(), language_loss, 10, lr=3e-3)
        assert losses[-1] < 0.8 * losses[0]
        expected = model.eval()(IDS).logits.detach()
        assert torch.equal(ModelQuantizer.freeze(model)(IDS).logits, expected)

    def test_refusals(self, build):
        model = ModelQuantizer(Config(scheme("int4_wo_32"))).quantize_model(build())
        with pytest.raises(ValueError, match="No layer is frozen"):
            unfreeze(model)
        ModelQuantizer.freeze(model)
        layer = model.model.layers[1].mlp.down_proj
        layer.weight.data += 0.3 * layer.weight_quantizer.scale.max()
        with pytest.raises(ValueError, match=r"layers.1.mlp.down_proj.weight cannot train"):
            unfreeze(model)
        assert all(m.frozen for m in model.modules() if hasattr(m, "frozen"))


class TestLanguageModels:
    @pytest.mark.parametrize("name", ["int4_wo_32", "mxfp4", "nvfp4", "int8", "fp8"])
    def test_the_loss_goes_down_and_the_checkpoint_is_exact(self, build, batches, name, tmp_path):
        config = Config(scheme(name), exclude=["lm_head"])
        model = ModelQuantizer(config).quantize_model(build(), batches)
        losses = fit(model.train(), language_loss, 12, lr=3e-3)
        assert losses[-1] < 0.7 * losses[0]
        expected = model.eval()(IDS).logits.detach()
        ModelQuantizer.freeze(model)
        assert torch.equal(model(IDS).logits, expected)
        export_safetensors(model, str(tmp_path / "out"))
        loaded = import_model_from_safetensors(None, str(tmp_path / "out"))
        for path, layer in quantized_layers(model):
            assert torch.equal(loaded.get_submodule(path).value("weight"), layer.weight)
        torch.testing.assert_close(loaded(IDS).logits, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.nightly
    @pytest.mark.parametrize("name", [n for n in scheme_names() if not n.endswith(("_64", "_128"))])
    def test_every_scheme_trains(self, build, batches, name):
        config = Config(scheme(name, 32), exclude=["lm_head"])
        model = ModelQuantizer(config).quantize_model(build(), batches)
        losses = fit(model.train(), language_loss, 8, lr=3e-3)
        assert losses[-1] < 0.85 * losses[0]
        expected = model.eval()(IDS).logits.detach()
        assert torch.equal(ModelQuantizer.freeze(model)(IDS).logits, expected)

    @pytest.mark.parametrize("qat_spec", [QATSpec(), TQTSpec()])
    def test_trained_ranges_in_a_checkpoint(self, build, qat_spec, tmp_path):
        model = ModelQuantizer(learned(qat_spec)).quantize_model(build(), [])
        losses = fit(model.train(), language_loss, 10, lr=3e-3)
        assert losses[-1] < 0.8 * losses[0]
        expected = model.eval()(IDS).logits.detach()
        export_safetensors(ModelQuantizer.freeze(model), str(tmp_path / "out"))
        loaded = import_model_from_safetensors(None, str(tmp_path / "out"))
        assert torch.equal(loaded(IDS).logits, expected)
        assert not any("learned_range" in n for n in loaded.state_dict())

    @pytest.mark.parametrize("name", ["mxfp4", "int8"])
    def test_autocast(self, build, batches, name):
        def loss(model):
            with torch.autocast("cpu", torch.bfloat16):
                return language_loss(model)

        config = Config(scheme(name), exclude=["lm_head"])
        model = ModelQuantizer(config).quantize_model(build(), batches).train()
        losses = fit(model, loss, 10, lr=3e-3)
        assert losses[-1] < 0.8 * losses[0]
        assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32

    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("kind", ["int8", "lsq"])
    def test_gradient_checkpointing_changes_no_bit(self, build, batches, kind, use_reentrant):
        config = learned(QATSpec()) if kind == "lsq" else Config(scheme(kind), exclude=["lm_head"])
        model = ModelQuantizer(config).quantize_model(build(), batches).train()
        other = copy.deepcopy(model)
        other.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        other.enable_input_require_grads()
        losses = [fit(each, language_loss, 3) for each in (model, other)]
        assert losses[0] == losses[1]
        a, b = model.state_dict(), other.state_dict()
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_ranges_of_the_edges_of_graphs_follow_freeze_and_train_again():
    """They are part of no layer."""
    model = ModelQuantizer(graph_config()).quantize_model(export(network("unet")), images())
    edges = edge_quantizers(model)

    def moves(factor):
        before = {name: quantizer.scale.clone() for name, quantizer in edges.items()}
        model.train()(images()[0] * factor)
        return {not torch.equal(q.scale, before[name]) for name, q in edges.items()}

    follow_ranges(model, steps=1, averaging_constant=0.5)
    assert moves(2) == {True} and moves(3) == {False}
    follow_ranges(model, averaging_constant=0.5)
    assert moves(4) == {True}
    freeze_ranges(model)
    assert moves(5) == {False}
    frozen = ModelQuantizer.freeze(model.eval())
    assert moves(6) == {False}
    unfreeze(frozen)
    assert moves(7) == {True}


@pytest.mark.parametrize(
    ("mode", "kind"), [("eager", "lsq"), ("graph", "tqt"), ("graph", "following")]
)
@pytest.mark.sampled(2)
def test_training_under_torch_compile_has_the_bits_of_training_without(mode, kind):
    """In-place activations and a batch norm too; ranges are frozen after two of three steps."""
    qat_spec = {"lsq": QATSpec(), "tqt": TQTSpec("_3SD"), "following": None}[kind]
    tensor = QuantizationSpec("int8", **TENSOR, qat_spec=qat_spec)
    config = Config(QuantizationConfig(weight=tensor, input_tensors=tensor))
    if mode == "graph":
        layer = QuantizationConfig(weight=tensor, input_tensors=tensor, output_tensors=tensor)
        config = graph_config(layer)
    results = []
    for compiles in (False, True):
        torch._dynamo.reset()
        net = export(conv_net().eval(), IMAGES) if mode == "graph" else conv_net()
        model = ModelQuantizer(config).quantize_model(net, [IMAGES]).train()
        first = {name: value.clone() for name, value in model.state_dict().items()}
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(3):
            if step == 2:
                freeze_ranges(model)
            optimizer.zero_grad()
            nn.functional.cross_entropy(call(IMAGES), LABELS).backward()
            optimizer.step()
        results.append(ModelQuantizer.freeze(model.eval()).state_dict())
    expected, state = results
    assert expected.keys() == state.keys()
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []
    ranges = [name for name in state if name.endswith(("scale", "learned_range"))]
    assert ranges and any(not torch.equal(state[name], first[name]) for name in ranges)
