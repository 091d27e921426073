"""GPTQ with act order: groups of inputs in any order, checked against codes written by hand."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quark.torch import ModelExporter, ModelImporter, export_gguf, export_onnx, save_params
from quark.torch.export.conversion import convert
from quark.torch.export.recognition import open_checkpoint, read_contents

GROUP = 32
FIRST, SECOND = "gptq", "gptq_v2"
IN_ORDER = "model.layers.0.mlp.up_proj"
LAYER = "model.layers.1.mlp.down_proj"
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Bits, whether symmetric, what zero points are stored as.
CASES = [
    *((bits, True, FIRST) for bits in (2, 3, 4, 8)),
    *((bits, False, SECOND) for bits in (2, 3, 4, 8)),
    (4, True, SECOND),
    (4, False, FIRST),
]


def words_of(codes, bits):
    """Rows of codes as rows of 32-bit words, the first code in the lowest bits."""
    rows = []
    for row in codes.tolist():
        number = sum(code << bits * i for i, code in enumerate(row))
        words = [number >> 32 * i & 0xFFFFFFFF for i in range(len(row) * bits // 32)]
        rows.append([word - (word >> 31 << 32) for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def quantized(shape, bits, symmetric, stored_as, is_shuffled):
    """Stored tensors of a layer, and the weight that they stand for."""
    (outputs, inputs), groups = shape, shape[1] // GROUP
    codes = torch.randint(0, 1 << bits, shape)
    zeros = torch.randint(1, 1 << bits, (groups, outputs))
    zeros = torch.full_like(zeros, 1 << bits - 1) if symmetric else zeros
    scales = 0.02 + 0.02 * torch.rand(groups, outputs)
    order = torch.randperm(inputs) if is_shuffled else torch.arange(inputs)
    group = order // GROUP
    stored = {
        "qweight": words_of(codes, bits).T.contiguous(),
        "qzeros": words_of(zeros - int(stored_as == FIRST), bits),
        "scales": scales,
        "g_idx": group.int(),
    }
    return stored, (codes - zeros[group].T) * scales[group].T


@pytest.fixture
def write(build, tmp_path):
    """Write a checkpoint of random codes, and return it with the float model of their values."""

    def write(bits=4, symmetric=True, stored_as=FIRST, kind="llama", **changes):
        from quark.torch.quantization.nn.experts import split_experts

        model, path = build(kind, **changes), tmp_path / "act-order"
        split_experts(model)
        tensors = {n: t.clone() for n, t in model.state_dict().items()}
        layers = {
            n: m
            for n, m in model.named_modules()
            if isinstance(m, nn.Linear) and n.startswith("model.layers.")
        }
        for name, layer in layers.items():
            shape = tuple(layer.weight.shape)
            parts, weight = quantized(shape, bits, symmetric, stored_as, name != IN_ORDER)
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            del tensors[f"{name}.weight"]
            layer.weight.data = weight
        described = model.config.to_dict()
        described["quantization_config"] = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": GROUP,
            "sym": symmetric,
            "desc_act": True,
            "checkpoint_format": stored_as,
        }
        path.mkdir()
        (path / "config.json").write_text(json.dumps(described))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return model, path

    return write


def stored_of(path):
    return load_file(path / "model.safetensors")


def section_of(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def same(one, two):
    return one.keys() == two.keys() and all(
        tensor.equal(two[name]) and tensor.dtype == two[name].dtype for name, tensor in one.items()
    )


class TestRead:
    @pytest.mark.parametrize(("bits", "symmetric", "stored_as"), CASES)
    def test_weights_and_predictions_are_those_of_the_codes(
        self, write, build, logits, bits, symmetric, stored_as
    ):
        model, path = write(bits, symmetric, stored_as)
        loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
        layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        for name in layers[:-1]:
            assert (
                loaded.get_submodule(name).value("weight").equal(model.get_submodule(name).weight)
            )
        assert logits(loaded).equal(logits(model))

    def test_codes_in_full_are_in_the_order_of_groups(self, write):
        model, path = write()
        state = open_checkpoint(path).fill().get_submodule(LAYER).quantized_tensor("weight")
        groups = stored_of(path)[f"{LAYER}.g_idx"].long()
        assert groups[state.order].equal(torch.arange(len(groups)) // GROUP)
        codes = state.codes.reshape(64, -1, GROUP).int()
        values = (codes - state.zero_point.unsqueeze(2)) * state.scale.unsqueeze(2)
        expected = model.get_submodule(LAYER).weight[:, state.order]
        assert values.reshape(64, -1).equal(expected)

    def test_half_precision(self, write, build, logits):
        model, path = write()
        loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
        weight = loaded.get_submodule(LAYER).value("weight", torch.bfloat16)
        assert weight.equal(model.get_submodule(LAYER).weight.bfloat16())

    @pytest.mark.parametrize("value", [-1, 3, 1 << 30])
    def test_groups_that_are_not_there(self, write, value):
        _, path = write()
        tensors = stored_of(path)
        tensors[f"{LAYER}.g_idx"][5] = value
        save_file(tensors, path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"{LAYER}\.g_idx: inputs are not in groups of 32"):
            open_checkpoint(path)

    def test_layers_that_do_not_say(self, write):
        """Nothing tells a layer in order from one whose groups were lost."""
        _, path = write()
        tensors = stored_of(path)
        del tensors[f"{IN_ORDER}.g_idx"]
        save_file(tensors, path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"{IN_ORDER}\.g_idx is missing"):
            open_checkpoint(path)

    def test_experts(self, write, logits):
        model, path = write(kind="mixtral", **EXPERTS)
        assert logits(open_checkpoint(path).fill()).equal(logits(model))

    def test_contents(self, write):
        layers = {layer.name: layer for layer in read_contents(write()[1]).summary.layers}
        assert len(layers) == 14 and layers[LAYER].weights == 64 * 96
        # codes, a zero point and a scale of each group, and the group of each input
        assert layers[LAYER].bits == 8 * (64 * 96 // 2 + 3 * 64 // 2 + 3 * 64 * 4 + 96 * 4)


class TestWrite:
    @pytest.mark.parametrize(("bits", "symmetric", "stored_as"), CASES[:-2])
    @pytest.mark.sampled(3)
    def test_again(self, write, tmp_path, bits, symmetric, stored_as):
        _, path = write(bits, symmetric, stored_as)
        convert(path, tmp_path / "out", "gptq", verify=True)
        assert same(stored_of(tmp_path / "out"), stored_of(path))
        section, before = section_of(tmp_path / "out"), section_of(path)
        assert {key: section[key] for key in before} == before

    @pytest.mark.parametrize(("bits", "symmetric", "stored_as"), CASES[-2:])
    def test_again_with_the_zero_points_that_lose_nothing(
        self, write, logits, tmp_path, bits, symmetric, stored_as
    ):
        model, path = write(bits, symmetric, stored_as)
        convert(path, tmp_path / "out", "gptq")
        assert section_of(tmp_path / "out")["checkpoint_format"] != stored_as
        assert logits(open_checkpoint(tmp_path / "out").fill()).equal(logits(model))

    def test_experts(self, write, logits, tmp_path):
        model, path = write(kind="mixtral", **EXPERTS)
        convert(path, tmp_path / "out", "gptq")
        assert logits(open_checkpoint(tmp_path / "out").fill()).equal(logits(model))

    def test_the_native_format(self, write, build, logits, tmp_path):
        model, path = write()
        exporter = ModelExporter(tmp_path / "native")
        exporter.export_quark_model(open_checkpoint(path).fill(), custom_mode="gptq")
        loaded = ModelImporter(tmp_path / "native").import_model_info(build(device="meta"))
        assert logits(loaded).equal(logits(model))

    @pytest.mark.parametrize("mode", ["quark", "awq", "compressed-tensors"])
    def test_formats_without_a_place_for_it(self, write, tmp_path, mode):
        _, path = write()
        with pytest.raises(ValueError, match=rf"custom_mode='{mode}' cannot hold .*act order\)"):
            convert(path, tmp_path / "out", mode)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("package", "export"),
        [
            ("gguf", lambda model, out: export_gguf(model, out, "model", out.parent)),
            ("onnxscript", lambda model, out: export_onnx(model, out, torch.ones(1, 4).long())),
            ("torch", lambda model, out: save_params(model, "model", export_dir=out)),
        ],
        ids=["gguf", "onnx", "params"],
    )
    def test_files_without_a_place_for_it(self, write, tmp_path, package, export):
        pytest.importorskip(package)
        model = open_checkpoint(write()[1]).fill()
        with pytest.raises(ValueError, match=r"cannot hold .*act order"):
            export(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_layers_in_order_may_go_anywhere(write, tmp_path, logits):
    """What counts is the stored order, not what the configuration says."""
    model, path = write()
    tensors = stored_of(path)
    for name in [n for n in tensors if n.endswith("g_idx")]:
        tensors[name] = tensors[name].sort().values
    save_file(tensors, path / "model.safetensors")
    convert(path, tmp_path / "out", "awq")
    one, two = (open_checkpoint(place).fill() for place in (path, tmp_path / "out"))
    assert logits(one).equal(logits(two)) and not logits(one).equal(logits(model))
