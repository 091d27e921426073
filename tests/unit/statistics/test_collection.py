"""Statistics of a float model: what they hold, and what is solved with them alone."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quark.torch import ModelQuantizer, save_statistics
from quark.torch.quantization.config.algo import (
    AWQConfig,
    GPTQConfig,
    QronosConfig,
    SmoothQuantConfig,
)
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from quark.torch.statistics import collection
from quark.torch.statistics.collection import collect_statistics

IMAGES = torch.ones(2, 3, 8, 8)
CONVOLUTIONS = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())


@pytest.fixture(scope="module")
def collected(build, batches):
    """Statistics of a model, by its name."""
    return cache(lambda name: collect_statistics(build(name), batches))


def seen_by(model, batches):
    """Layer -> what went into it, (tokens, inputs), when the whole model runs."""
    seen = {}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(
            lambda module, args, name=name: seen.setdefault(name, []).append(args[0].flatten(0, -2))
        )
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return {name: torch.cat(rows) for name, rows in seen.items()}


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_sums_are_those_of_the_inputs(name, build, batches, collected):
    expected = seen_by(build(name), batches)
    found = collected(name)
    assert set(found.readers) == {layer for layer in expected if "layers." in layer}
    for layer, first in found.readers.items():
        x, gram = expected[layer], found.inputs[first]
        torch.testing.assert_close(gram.total, x.T @ x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gram.magnitude, x.abs().sum(0), rtol=1e-4, atol=1e-4)
        assert gram.tokens == len(x)


def test_layers_that_read_the_same_share_sums(collected):
    readers = collected("llama").readers
    block = "model.layers.1"
    q, k, v = (readers[f"{block}.self_attn.{name}_proj"] for name in "qkv")
    gate, up = (readers[f"{block}.mlp.{name}_proj"] for name in ("gate", "up"))
    assert q == k == v
    assert gate == up != q


def test_collecting_leaves_no_trace(build, batches, unchanged):
    model = build("tied")
    with unchanged(model):
        collect_statistics(model, batches)


def outputs_of(model, block, batches):
    """Outputs of a block, (tokens, channels), and log-probabilities of the whole model."""
    states = []
    model.get_submodule(block).register_forward_hook(
        lambda *args: states.append(args[-1].flatten(0, -2))
    )
    with torch.no_grad():
        log_probs = [model(batch).logits.flatten(0, 1).log_softmax(-1) for batch in batches]
    return torch.cat(states), torch.cat(log_probs)


@pytest.mark.parametrize("probes", [1, 2])
def test_probes_are_what_rounding_a_layer_does(probes, build, batches):
    """Round each layer by hand; look at its block, and at the predictions of the whole model."""
    statistics = collect_statistics(build("llama"), batches, probes=probes)
    inputs = seen_by(build("llama"), batches)
    seen = slice(batches[0].numel() if probes == 1 else None)  # tokens that are predicted
    ratios, lost, relative = {}, {}, {}
    for name in statistics.probes:
        block = ".".join(name.split(".")[:3])
        states, log_probs = outputs_of(build("llama"), block, batches)
        for bits, found in ((4, statistics.fine_probes), (2, statistics.probes)):
            model = build("llama")
            weight = model.get_submodule(name).weight
            size = 64 if weight.shape[1] % 64 == 0 else weight.shape[1]
            spec = scheme(f"int{bits}_wo_64").weight.changed(group_size=size)
            quantizer = TensorQuantizer(spec.for_parameter())
            with torch.no_grad():
                change = quantizer.fake_quantize_copy(weight) - weight
                weight += change
            others, changed = outputs_of(model, block, batches)
            relative[name, bits] = ((others - states).norm(dim=1) / states.norm(dim=1)).square()
            assert found[name].tokens == len(inputs[name][seen])
            assert found[name].error == pytest.approx(
                float((inputs[name] @ change.T).square().sum().detach()), rel=1e-3
            )
        lost[name] = (log_probs.exp() * (log_probs - changed)).sum(-1)[seen]
        roots = (
            x.clamp_min(0).sqrt().mean().square() for x in (lost[name], relative[name, 2][seen])
        )
        ratios[name] = float(next(roots) / next(roots))
    expected = sum(ratio * float(relative[n, 2][seen].mean()) for n, ratio in ratios.items())
    factor = sum(float(x.mean()) for x in lost.values()) / expected
    for name, ratio in ratios.items():
        for bits, found in ((2, statistics.probes[name]), (4, statistics.fine_probes[name])):
            loss = factor * ratio * float(relative[name, bits].mean())
            assert found.divergence / found.tokens == pytest.approx(loss, rel=5e-3)


def test_no_probes_no_sensitivities(build, batches):
    found = collect_statistics(build(), batches, probes=0)
    assert (found.probes, found.fine_probes) == ({}, {})


def test_padding_does_not_count(build, batches):
    ids = batches[0]
    padded = torch.cat([torch.full((len(ids), 3), 2), ids], 1)
    mask = torch.cat([torch.zeros(len(ids), 3), torch.ones_like(ids)], 1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = {"input_ids": padded, "attention_mask": mask, "position_ids": positions}
    found = collect_statistics(build(), [batch])
    expected = collect_statistics(build(), [ids])
    for name, gram in expected.inputs.items():
        torch.testing.assert_close(found.inputs[name].total, gram.total, rtol=1e-3, atol=1e-3)
    for name, probe in expected.probes.items():
        assert found.probes[name].sensitivity == pytest.approx(probe.sensitivity, rel=1e-2)
        fine = expected.fine_probes[name].sensitivity
        assert found.fine_probes[name].sensitivity == pytest.approx(fine, rel=1e-2)


def test_experts_are_one_unit(build, batches):
    model = build("mixtral", num_local_experts=4)
    found = collect_statistics(model, batches)
    sizes = sorted(len(unit) for unit in found.units)
    assert sizes == [1] * 8 + [12, 12]  # q, k, v, o; experts × (gate, up, down)
    assert not any(".experts.0." in name for name, _ in model.named_modules())


@pytest.mark.parametrize("data", [[], iter([])], ids=["list", "iterator"])
def test_no_data_is_an_error(build, data):
    with pytest.raises(ValueError, match="at least a batch"):
        collect_statistics(build(), data)


def quantized(model, config, **given):
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, **given)).state_dict()


def differing(found, expected):
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("scheme", ["int4_wo_32", "uint4_wo_32", "int8_wo"])
def test_awq_does_the_same_without_data(scheme, build, batches, config_of, collected):
    config = config_of(scheme, algo_config=[AWQConfig()])
    expected = quantized(build(), config, dataloader=batches)
    assert differing(quantized(build(), config, statistics=collected("llama")), expected) == []


def test_gptq_does_the_same_in_the_first_block(build, batches, config_of, collected):
    """Later blocks see inputs that earlier ones have changed, unless statistics tell."""
    config = config_of("int3_wo_32", algo_config=[GPTQConfig()])
    expected = quantized(build(), config, dataloader=batches)
    found = quantized(build(), config, statistics=collected("llama"))
    other = differing(found, expected)
    assert other
    assert all(name.startswith("model.layers.1.") for name in other)


def test_statistics_serve_again_and_again(build, batches, config_of, collected):
    config = config_of("int4_wo_32", algo_config=[AWQConfig()])
    first, second = (quantized(build(), config, statistics=collected("llama")) for _ in range(2))
    assert differing(second, first) == []


REFUSED = {
    "none": ([], "got none"),
    "two": ([AWQConfig(), GPTQConfig()], "got awq, gptq"),
    "looks at data": ([QronosConfig()], "got qronos"),
    "moves inputs": ([SmoothQuantConfig()], "got smooth"),
    "in turn": ([GPTQConfig(true_sequential=True)], "true_sequential"),
    "holds data back": ([GPTQConfig(choose_damping=True)], "choose_damping"),
    "adds data": ([GPTQConfig(random_tokens=0.25)], "random_tokens"),
}


@pytest.mark.parametrize(("algorithms", "said"), REFUSED.values(), ids=REFUSED)
def test_what_statistics_cannot_serve_is_refused(
    algorithms, said, build, config_of, collected, unchanged
):
    model = build()
    config = config_of("int4_wo_32", algo_config=algorithms)
    with unchanged(model), pytest.raises(ValueError, match=said):
        quantized(model, config, statistics=collected("llama"))


def test_statistics_of_another_model_are_refused(build, config_of, collected):
    model = build()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    config = config_of("int4_wo_32", algo_config=[GPTQConfig()])
    with pytest.raises(ValueError, match=r"1 of its \d+ tensors .*layers.1.mlp.up_proj.weight"):
        quantized(model, config, statistics=collected("llama"))
    with pytest.raises(ValueError, match="of another model"):
        quantized(build(dtype=torch.bfloat16), config, statistics=collected("llama"))


def test_statistics_of_other_data_are_refused(build, batches, config_of, collected):
    config = config_of("int4_wo_32", algo_config=[GPTQConfig()])
    with pytest.raises(ValueError, match="of other data"):
        quantized(build(), config, dataloader=batches[:1], statistics=collected("llama"))


def test_a_layer_without_statistics_is_named(build, batches, config_of, collected):
    config = config_of("int4_wo_32", exclude=(), algo_config=[GPTQConfig()])
    state = quantized(build(), config, statistics=collected("llama"))  # the head is in no block
    assert "lm_head._weight_quantizer.scale" in state
    model, found = build(), collected("llama")
    layers = {"lm_head": model.lm_head}
    with pytest.raises(ValueError, match="lack lm_head"):
        found.grams(layers)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_the_size_is_known_before_the_data_runs(name, build, batches, tmp_path, monkeypatch):
    """With one token in each sample, it is exact."""
    monkeypatch.setattr(collection, "TOKENS", 1)
    sizes = []
    save_statistics(
        collect_statistics(build(name), batches, 0, check_size=sizes.append), tmp_path / "kept"
    )
    stored = load_file(tmp_path / "kept/statistics.safetensors")
    assert sizes == [sum(tensor.nbytes for tensor in stored.values())]


def test_no_room_is_noticed_before_the_data_runs(build, batches, unchanged, monkeypatch):
    def refuse(size):
        raise OSError(f"{size} bytes are too many")

    monkeypatch.setattr(collection, "run_blocks", None)  # not called
    model = build()
    with unchanged(model), pytest.raises(OSError, match="bytes are too many"):
        collect_statistics(model, batches, check_size=refuse)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.export.export(CONVOLUTIONS, (IMAGES,)).module(), "is a graph"),
        (lambda: CONVOLUTIONS, "Sequential has no linear layers in decoder blocks"),
        (lambda: nn.Sequential(*CONVOLUTIONS, nn.Flatten(), nn.Linear(108, 2)), "Sequential has"),
    ],
    ids=["graph", "convolutions", "linear layer at the end"],
)
def test_networks_without_decoder_blocks_are_refused(make, reason):
    with pytest.raises(ValueError, match=f"{reason}.*pass the dataloader to quantize_model"):
        collect_statistics(make(), [IMAGES])
