"""Layers with rotated inputs: they compute the same, and come back from every file bit by bit."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from quark.torch import ModelImporter, ModelQuantizer, load_params, save_params
from quark.torch.export.checkpoint.rotation_config import with_rotations
from quark.torch.numerics.hadamard import hadamard, random_hadamard, rotate
from quark.torch.quantization.config.config import (
    AWQConfig,
    Config,
    OnlineRotationConfig,
    QuaRotConfig,
    RotationConfig,
)

DOWN = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
SCHEMES = ["int8", "mxfp4", "ptpc_int8", "uint4_wo_32"]


def rotated(model, config, batches, rotation):
    """Quantize a model whose down projections have rotated inputs."""
    model = ModelQuantizer(config).quantize_model(model, batches)
    for name in DOWN:
        layer = model.get_submodule(name)
        layer.rotate_input(rotation)
        layer.weight_quantizer.observer(layer.weight)
        layer.weight_quantizer.compute_scales(layer.weight)
    return ModelQuantizer.freeze(model)


@pytest.fixture
def make(build, batches, config_of):
    def make(scheme, rotation, **changes):
        model = build("llama", intermediate_size=96, **changes)
        return rotated(model, config_of(scheme), batches, rotation)

    return make


SKEW = torch.arange(48 * 48, dtype=torch.float64).sin().view(48, 48)
ROTATIONS = {
    "full": hadamard(96),
    "blocks": random_hadamard(32, torch.Generator().manual_seed(3)),
    "learned": torch.linalg.matrix_exp(SKEW - SKEW.T),
}


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sampled(2, covers=True)
def test_what_is_imported_computes_the_same_bits(scheme, rotation, make, build, export, logits):
    model = make(scheme, rotation)
    path = export(model)
    read = ModelImporter(path, "safetensors").import_model_info(build("llama", device="meta"))
    assert torch.equal(logits(read), logits(model))
    again = ModelImporter(export(read), "safetensors").import_model_info(build("llama"))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["mxfp4", "ptpc_int8"])
@pytest.mark.sampled(2, covers=True)
def test_transformers_loads_it(scheme, kind, rotation, make, export, logits):
    model = make(scheme, rotation, dtype=kind)
    read = AutoModelForCausalLM.from_pretrained(export(model), dtype="auto")
    assert torch.equal(logits(read), logits(model))


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
def test_parameter_files(rotation, compressed, make, build, logits, tmp_path):
    model = make("mxfp4", rotation)
    save_params(model, "llama", export_dir=tmp_path / "out", compressed=compressed)
    files = {"json_path": "llama.json", "safetensors_path": "llama.safetensors"}
    paths = {key: tmp_path / "out" / name for key, name in files.items()}
    read = load_params(build("llama"), **paths, compressed=compressed)
    assert torch.equal(logits(read), logits(model))


def test_parameter_files_that_differ(make, build, tmp_path):
    save_params(make("mxfp4", hadamard(96)), "a", export_dir=tmp_path / "a", compressed=True)
    described = json.loads((tmp_path / "a" / "a.json").read_text())
    described["structure"]["model"]["norm"]["input_rotation"] = "model.norm.input_rotation"
    (tmp_path / "b.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"model\.norm\.input_rotation is not stored"):
        load_params(build(), tmp_path / "b.json", tmp_path / "a" / "a.safetensors")


def test_values_in_a_checkpoint(make, build, export, logits):
    model = make("int8", hadamard(96))
    path = export(model, weight_format="fake_quantized")
    read = ModelImporter(path, "safetensors").import_model_info(build("llama"))
    assert torch.equal(logits(read), logits(model))


def test_the_configuration_that_is_written(make, export):
    path = export(make("mxfp4", hadamard(32)))
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    options = section["algo_config"][0]
    assert options["name"] == "rotation" and options["rotation_size"] == 32
    assert options["online_config"]["online_rotation_layers"] == DOWN
    assert options["trainable"] is False and options["r3"] is False


def test_a_tensor_per_layer_is_stored(make, export):
    from safetensors.torch import load_file

    stored = load_file(export(make("mxfp4", ROTATIONS["blocks"])) / "model.safetensors")
    for name in DOWN:
        assert torch.equal(stored[f"{name}.input_rotation"], ROTATIONS["blocks"])


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (RotationConfig(r4=True), DOWN),
        (RotationConfig(online_config=OnlineRotationConfig(online_rotation_layers=DOWN)), DOWN),
        (QuaRotConfig(r4=False), []),
    ],
    ids=["r4", "list", "offline"],
)
def test_layers_that_a_configuration_means(options, names, make, build, export):
    """Of files of other versions, which do not all list the layers."""
    path = export(make("mxfp4", hadamard(96)))
    file = path / "config.json"
    config = json.loads(file.read_text())
    read = Config(algo_config=[options]).to_dict()["algo_config"]
    config["quantization_config"]["algo_config"] = read
    file.write_text(json.dumps(config))
    importer = ModelImporter(path, "safetensors")
    if not names:
        with pytest.raises(ValueError, match=r"input_rotation.* are unexpected"):
            importer.import_model_info(build())
        return
    model = importer.import_model_info(build())
    assert [n for n, _ in model.named_buffers() if n.endswith("input_rotation")] == [
        f"{name}.input_rotation" for name in names
    ]


def test_the_rotation_is_named_first():
    given = Config(algo_config=[AWQConfig(), QuaRotConfig()])
    written = with_rotations(given, {})
    assert [type(a) for a in written.algo_config] == [RotationConfig, AWQConfig]
    assert written.algo_config[0].name == "rotation" and written.algo_config[0].r2
    assert not written.algo_config[0].r3 and given.algo_config[1].r3
    assert with_rotations(Config(), {}).algo_config is None


def test_rotations_of_two_sizes_are_refused():
    with pytest.raises(ValueError, match=r"several kinds .*give rotation_size"):
        with_rotations(Config(), {"a": hadamard(4), "b": hadamard(8)})


def test_a_missing_rotation_is_noticed(make, build, export):
    path = export(make("mxfp4", hadamard(96)))
    from safetensors.torch import load_file, save_file

    stored = load_file(path / "model.safetensors")
    del stored[f"{DOWN[0]}.input_rotation"]
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"down_proj\.input_rotation is missing"):
        ModelImporter(path, "safetensors").import_model_info(build())


def test_a_stored_rotation_is_applied_as_documented(make, export):
    """The formula readers use: x M / sqrt(n), block by block."""
    model = make("uint4_wo_32", ROTATIONS["blocks"])
    layer = model.get_submodule(DOWN[0])
    x = torch.randn(3, 96)
    turned = (x.view(3, 3, 32) @ (ROTATIONS["blocks"].float() / 32**0.5)).view(3, 96)
    torch.testing.assert_close(layer(x), turned @ layer.weight.T)
    torch.testing.assert_close(rotate(x, layer.input_rotation), turned)
