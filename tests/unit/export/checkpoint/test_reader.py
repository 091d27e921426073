"""Checkpoints that fit are read without ever making float weights; others leave the model alone."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quark.torch import ModelImporter
from quark.torch.export.api import _map_to_quark
from quark.torch.export.recognition import recognize_format
from quark.torch.files import size_of
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.operators import QParamsLinear

LAYER = "model.layers.1.mlp.up_proj"


def read(path, model):
    return ModelImporter(path, "safetensors").import_model_info(model)


def edit_tensors(path, change):
    """Apply a function to the stored tensors in place."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, file, metadata={"format": "pt"})


def edit_section(path, change):
    """Apply a function to the quantization_config in place."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def renamed(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def replaced(name, make):
    return lambda tensors: tensors.update({name: make(tensors[name])})


BAD_TENSORS = {
    "missing_weight": (
        lambda t: t.pop(f"{LAYER}.weight"),
        rf"does not fit LlamaForCausalLM: {LAYER}\.weight is missing \(there is .*\)\.$",
    ),
    "missing_scale": (
        lambda t: t.pop(f"{LAYER}.weight_scale"),
        rf"{LAYER}\.weight_quantizer\.scale is missing",
    ),
    "missing_offset_of_an_asymmetric_weight": (
        lambda t: t.pop(f"{LAYER}.weight_zero_point"),
        rf"{LAYER}\.weight_quantizer\.zero_point is missing",
    ),
    "missing_embedding": (
        lambda t: t.pop("model.embed_tokens.weight"),
        r"model\.embed_tokens\.weight is missing",
    ),
    "extra": (
        lambda t: t.update(stranger=torch.ones(2)),
        r"does not fit LlamaForCausalLM: stranger is unexpected\.$",
    ),
    "renamed": (
        renamed(f"{LAYER}.weight", f"{LAYER}.weigth"),
        rf"{LAYER}\.weight is missing \(there is {LAYER}\.weigth\); {LAYER}\.weigth is unexpected",
    ),
    "many": (
        lambda t: [t.pop(k) for k in list(t) if "layers.0" in k],
        r"and 20 more are missing",
    ),
    "other_shape": (
        replaced(f"{LAYER}.weight", lambda x: x[:-1]),
        rf"{LAYER}\.weight is torch\.int32 \[63, 12\], expected torch\.int32 \[64, 12\]",
    ),
    "other_shape_of_a_scale": (
        replaced(f"{LAYER}.weight_scale", lambda x: x.t()),
        r"weight_quantizer\.scale is torch\.float32 \[96, 2\], expected torch\.float32 \[2, 96\]",
    ),
    "other_shape_of_the_rest": (
        replaced("model.norm.weight", lambda x: x[:32]),
        r"model\.norm\.weight is torch\.float32 \[32\], expected torch\.float32 \[64\]",
    ),
    "other_type": (
        replaced(f"{LAYER}.weight", lambda x: x.to(torch.int16)),
        rf"{LAYER}\.weight is torch\.int16 \[64, 12\], expected torch\.int32",
    ),
    "float_weights_instead_of_codes": (
        replaced(f"{LAYER}.weight", lambda x: torch.ones(96, 64)),
        rf"{LAYER}\.weight is torch\.float32 \[96, 64\], expected torch\.int32 \[64, 12\]",
    ),
    "codes_instead_of_an_embedding": (
        replaced("model.embed_tokens.weight", lambda x: x.to(torch.int8)),
        r"embed_tokens\.weight is torch\.int8 .*, expected torch\.float32",
    ),
}


def without_section(path):
    (path / "config.json").write_text("{}")


BAD_CONFIGS = {
    "no_config": (lambda p: (p / "config.json").unlink(), FileNotFoundError, "does not exist"),
    "no_json": (lambda p: (p / "config.json").write_text("{"), ValueError, "not valid JSON"),
    "not_quantized": (
        without_section,
        ValueError,
        r"config\.json has no quantization_config: this is not a quantized checkpoint",
    ),
    "other_method": (
        lambda p: edit_section(p, lambda s: s.update(quant_method="bitsandbytes")),
        ValueError,
        r"quant_method='bitsandbytes' is unknown \(known: quark",
    ),
    "unknown_type": (
        lambda p: edit_section(
            p, lambda s: s["global_quant_config"]["weight"].update(dtype="uint44")
        ),
        ValueError,
        r"dtype: 'uint44' is unknown\. Did you mean 'uint4'\?",
    ),
    "unknown_key": (
        lambda p: edit_section(p, lambda s: s.update(exclude_layers=[])),
        ValueError,
        r"'exclude_layers' is unknown\. Did you mean 'exclude'\?",
    ),
    "unknown_option": (
        lambda p: edit_section(p, lambda s: s["export"].update(weight_format="fake")),
        ValueError,
        "weight_format: 'fake' is unknown",
    ),
    "matches_nothing": (
        lambda p: edit_section(p, lambda s: s.update(exclude=["*"])),
        ValueError,
        "matches none of the 16 layers of LlamaForCausalLM: is this the architecture",
    ),
    "no_tensors": (
        lambda p: (p / "model.safetensors").unlink(),
        FileNotFoundError,
        r"has no \*\.safetensors",
    ),
    "truncated": (
        lambda p: (p / "model.safetensors").write_bytes(
            (p / "model.safetensors").read_bytes()[:-10]
        ),
        ValueError,
        "damaged or not a safetensors file",
    ),
}


class TestBadCheckpoints:
    @pytest.fixture
    def path(self, build, quantize, export):
        return export(quantize(build(), "w_uint4_per_group_asym"))

    @pytest.mark.parametrize(("change", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_tensors(self, build, path, unchanged, change, message, device):
        edit_tensors(path, change)
        model = build(device=device)
        if device == "meta":
            with pytest.raises(ValueError, match=message):
                read(path, model)
            assert type(model.get_submodule(LAYER)) is nn.Linear
        else:
            with unchanged(model), pytest.raises(ValueError, match=message):
                read(path, model)

    @pytest.mark.parametrize(("change", "error", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
    def test_configurations_and_files(self, build, path, unchanged, change, error, message):
        change(path)
        model = build()
        with unchanged(model), pytest.raises(error, match=message):
            read(path, model)

    def test_another_architecture(self, build, path, unchanged):
        model = build("opt")
        with unchanged(model), pytest.raises(ValueError, match="does not fit OPTForCausalLM"):
            read(path, model)

    def test_a_model_that_is_quantized_already(self, build, path, quantize, unchanged):
        for model in (quantize(build(), "int8_wo"), read(path, build())):
            with unchanged(model), pytest.raises(ValueError, match="quantized already: give the"):
                read(path, model)

    def test_several_stages(self):
        spec = scheme("int8_wo").weight.to_dict()
        section = {"global_quant_config": {"weight": [spec, spec, spec]}}
        with pytest.raises(ValueError, match="in one or two stages, got 3"):
            recognize_format({"quantization_config": section}, "config.json")


class TestTolerance:
    """What other writers of the format leave out or add."""

    def test_zero_points_of_symmetric_weights_may_be_missing(self, build, quantize, export, logits):
        model = quantize(build(), "int4_wo_32")
        path = export(model)
        edit_tensors(path, lambda t: [t.pop(k) for k in list(t) if k.endswith("weight_zero_point")])
        for device in ("cpu", "meta"):
            assert torch.equal(logits(read(path, build(device=device))), logits(model))

    def test_buffers_that_are_computed_and_scales_of_casts_may_be_there(
        self, build, quantize, export, logits
    ):
        model = quantize(build(), "bfloat16")
        path = export(model)
        edit_tensors(
            path,
            lambda t: t.update(
                {
                    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
                    f"{LAYER}.weight_scale": torch.ones(1),
                }
            ),
        )
        assert torch.equal(logits(read(path, build())), logits(model))

    def test_types_are_those_of_the_checkpoint(self, build, quantize, export, logits):
        model = quantize(build(dtype=torch.bfloat16), "int8")
        path = export(model)
        found = read(path, build(dtype=torch.float32))
        assert found.model.norm.weight.dtype == torch.bfloat16
        assert torch.equal(logits(found), logits(model))

    def test_the_model_is_returned_in_evaluation_mode(self, build, quantize, export, logits):
        model = quantize(build("opt"), "int8")
        found = build("opt").train()
        assert read(export(model), found) is found
        assert not any(module.training for module in found.modules())
        assert torch.equal(logits(found), logits(model))


class Allocations(TorchDispatchMode):
    """Notes the largest float tensor, in elements, that any operation makes in memory."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize > 1:
                self.largest = max(self.largest, 0 if x.is_meta else x.numel())
        return result


class TestMemory:
    # Quantized weights are larger than the embedding, which is the largest tensor in float.
    SIZES = {"vocab_size": 16, "hidden_size": 128, "intermediate_size": 192}  # noqa: RUF012
    FLOATS = 16 * 128

    @pytest.mark.parametrize("name", ["int8", "fp8", "int4_wo_32", "int2_wo_32"])
    @pytest.mark.parametrize("how", ["importer", "transformers"])
    def test_weights_are_never_made_in_float(self, build, quantize, export, batches, name, how):
        from transformers import AutoModelForCausalLM

        data = [torch.ones(1, 8, dtype=torch.long)]
        model = quantize(build(**self.SIZES), name, data)
        path = export(model)
        stored = load_file(path / "model.safetensors")
        with Allocations() as made:
            if how == "importer":
                found = read(path, build(device="meta", **self.SIZES))
            else:
                found = AutoModelForCausalLM.from_pretrained(path)
        assert made.largest <= self.FLOATS
        # Nothing is on the meta device, and what the model holds is what the file holds.
        assert not any(t.is_meta for t in found.state_dict().values())
        assert size_of(found.state_dict()) == size_of(stored)
        with Allocations() as made, torch.no_grad():
            found(data[0])
        assert made.largest >= 128 * 128  # a forward pass does make them, so they would be seen


class TestBuffersOnTheMetaDevice:
    def test_those_that_are_not_stored_are_computed(self, build, quantize, export, logits):
        """Without touching the weights of the module they belong to."""
        sizes = {"head_dim": 16, "query_pre_attn_scalar": 16}
        model = quantize(build("gemma2", **sizes), "int8_wo")
        assert "embed_scale" in dict(model.model.embed_tokens.named_buffers())
        found = read(export(model), build("gemma2", device="meta", **sizes))
        assert torch.equal(found.model.embed_tokens.weight, model.model.embed_tokens.weight)
        assert torch.equal(logits(found), logits(model))

    def test_those_that_cannot_be_computed_are_refused(self, quantize, export):
        class Offset(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(32, 8)
                self.register_buffer("offset", torch.ones(8), persistent=False)

            def forward(self, x):
                return self.linear(x) + self.offset

        model, x = quantize(Offset(), "int8_wo"), torch.randn(2, 32)
        path = export(model)
        with torch.device("meta"):
            empty = Offset()
        with pytest.raises(ValueError, match="offset is not stored and cannot be computed: build"):
            read(path, empty)
        assert type(empty.linear) is nn.Linear and empty.linear.weight.is_meta
        assert torch.equal(read(path, Offset())(x), model(x))


class TestTiedTensors:
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_they_stay_tied(self, build, quantize, export, logits, device):
        model = quantize(build("tied"), "int8")
        found = read(export(model), build("tied", device=device))
        assert found.lm_head.weight is found.model.embed_tokens.weight
        assert found.config.tie_word_embeddings is True
        assert torch.equal(logits(found), logits(model))

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_a_quantized_head_is_apart(self, build, quantize, export, config_of, logits, device):
        model = quantize(build("tied"), config_of("int8", []))
        found = read(export(model), build("tied", device=device))
        assert found.lm_head.state_dict()["weight"].dtype == torch.int8
        assert found.config.tie_word_embeddings is False
        assert torch.equal(found.model.embed_tokens.weight, build("tied").lm_head.weight)
        assert torch.equal(logits(found), logits(model))

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_a_head_of_which_only_the_input_is_quantized(
        self, build, quantize, export, config_of, logits, device
    ):
        head = QuantizationConfig(input_tensors=scheme("fp8").input_tensors)
        config = config_of("fp8_wo", [], layer_quant_config={"lm_head": head})
        model = quantize(build("tied"), config)
        found = read(export(model), build("tied", device=device))
        assert found.lm_head.weight is found.model.embed_tokens.weight
        assert torch.equal(logits(found), logits(model))

    def test_a_head_stored_apart_for_a_tied_architecture(self, build, quantize, export, logits):
        model = quantize(build(), "int8")
        found = read(export(model), build("tied"))
        assert found.config.tie_word_embeddings is False
        assert found.lm_head.weight is not found.model.embed_tokens.weight
        assert torch.equal(logits(found), logits(model))


class Twice(nn.Module):
    """A layer under two names, and a parameter that two modules hold."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.first = nn.Linear(32, 32)
        self.again = self.first
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.again(self.first(self.embed(x))))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("exclude", [["head"], []], ids=["tied_head", "quantized_head"])
def test_modules_and_parameters_under_two_names(quantize, export, config_of, device, exclude):
    model, x = Twice(), torch.arange(16).view(2, 8)
    quantize(model, config_of("int8", exclude), [x])
    with torch.device(device):
        found = read(export(model), Twice())
    assert found.again is found.first and type(found.first) is QParamsLinear
    assert (found.head.weight is found.embed.weight) == bool(exclude)
    assert torch.equal(found(x), model(x))


class TestMapToQuark:
    """What Transformers calls before it fills a model."""

    @pytest.mark.parametrize("method", ["reorder", "order"])
    def test_layers_are_ready_for_stored_tensors(self, build, quantize, export, config_of, method):
        model, config = build(device="meta"), config_of("int4_wo_32")
        _map_to_quark(model, config, pack_method=method, custom_mode="quark")
        layer = model.get_submodule(LAYER)
        assert isinstance(layer, QParamsLinear) and isinstance(layer, nn.Linear)
        assert type(model.lm_head) is nn.Linear
        stored = load_file(export(quantize(build(), config)) / "model.safetensors")
        renames = {"weight_scale": "weight_quantizer.scale"}
        renames["weight_zero_point"] = "weight_quantizer.zero_point"
        for name, tensor in layer.state_dict().items():
            old = {new: old for old, new in renames.items()}.get(name, name)
            assert tensor.is_meta and tensor.shape == stored[f"{LAYER}.{old}"].shape
            assert tensor.dtype == stored[f"{LAYER}.{old}"].dtype
        assert layer.layout.pack_method == method

    def test_an_unknown_format(self, build, config_of):
        with pytest.raises(ValueError, match="custom_mode: 'awq2' is unknown"):
            _map_to_quark(build(device="meta"), config_of("int8"), "reorder", "awq2")
