"""Rotations of inputs in checkpoints for compressed-tensors."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import ModelImporter, ModelQuantizer
from quark.torch.numerics.hadamard import hadamard, random_hadamard
from quark.torch.quantization.config.algo import OnlineRotationConfig, RotationConfig
from tests.configurations import preset

CT = "compressed-tensors"
DOWN = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
SKEW = torch.arange(48 * 48, dtype=torch.float64).sin().view(48, 48)
ROTATIONS = {
    "hadamard": hadamard(32),
    "signs": random_hadamard(32, torch.Generator().manual_seed(3)),
    "learned": torch.linalg.matrix_exp(SKEW - SKEW.T),
}
# All inputs, and the residual stream and values in the weights.
ALL = RotationConfig(
    r2=True,
    rotation_size=32,
    online_config=OnlineRotationConfig(online_rotation_layers=["*_proj"]),
)


@pytest.fixture
def make(build, batches):
    """Quantize a model whose down projections have rotated inputs."""

    def make(rotation):
        model = ModelQuantizer(preset("mxfp4")).quantize_model(build(), batches)
        for name in DOWN:
            layer = model.get_submodule(name)
            layer.rotate_input(rotation)
            layer.weight_quantizer.observer(layer.weight)
            layer.weight_quantizer.compute_scales(layer.weight)
        return ModelQuantizer.freeze(model)

    return make


@pytest.fixture
def read(build):
    def read(path):
        return ModelImporter(path, "safetensors").import_model_info(build(device="meta"))

    return read


@pytest.fixture
def edit():
    """Change the groups of transforms, or the tensors, of a checkpoint."""

    def edit(path, groups=None, tensors=None):
        config = json.loads((path / "config.json").read_text())
        if groups is not None:
            groups(config["quantization_config"]["transform_config"]["config_groups"])
            (path / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            stored = load_file(path / "model.safetensors")
            tensors(stored)
            save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return edit


def groups_of(path):
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    return section["transform_config"]["config_groups"]


@pytest.mark.parametrize("name", ROTATIONS)
def test_what_is_imported_computes_what_was_exported(make, read, export, logits, name):
    model = make(ROTATIONS[name])
    path = export(model, custom_mode=CT)
    loaded = read(path)
    # Learned matrices are stored in float32.
    torch.testing.assert_close(
        logits(loaded), logits(model), rtol=0, atol=0.02 if name == "learned" else 0
    )
    for layer in DOWN:
        ours, theirs = (m.get_submodule(layer).input_rotation for m in (model, loaded))
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-7)
    assert groups_of(export(loaded, custom_mode=CT)).keys() == groups_of(path).keys()


def test_group(make, export):
    ((name, group),) = groups_of(path := export(make(hadamard(32)), custom_mode=CT)).items()
    apply = {"ignore": [], "inverse": False, "location": "input", "targets": DOWN}
    assert group == {
        "apply": [apply],
        "head_dim": 32,
        "randomize": False,
        "requires_grad": False,
        "type": "hadamard",
    }
    stored = load_file(path / "model.safetensors")
    assert stored[f"{DOWN[0]}.{name}_input.weight"].float().equal(hadamard(32).float())


def test_other_matrices_are_read_from_the_file(make, export):
    """Kernels compute Sylvester's matrix where the type is "hadamard", whatever is stored."""
    for name in ("signs", "learned"):
        (group,) = groups_of(export(make(ROTATIONS[name]), custom_mode=CT)).values()
        assert group["type"] == "random-hadamard"


def test_all_inputs(build, quantize, read, export, logits):
    model = quantize(build(), preset("nvfp4", ALL))
    path = export(model, custom_mode=CT)
    (group,) = groups_of(path).values()
    assert len(group["apply"][0]["targets"]) == 14
    torch.testing.assert_close(logits(read(path)), logits(model), rtol=0, atol=0.02)


def test_convert_to_our_format(make, read, export, logits):
    model = make(ROTATIONS["signs"])
    again = export(read(export(model, custom_mode=CT)))
    assert logits(read(again)).equal(logits(model))


def test_other_spellings(make, read, export, logits, edit):
    """A pattern, a matrix stored once, its transpose, and rotations that are in the weights."""
    model = make(ROTATIONS["signs"])
    path = export(model, custom_mode=CT)
    ((name, _),) = groups_of(path).items()

    def groups(groups):
        (apply,) = groups[name]["apply"]
        apply |= {"targets": "re:.*down_proj$", "inverse": True}
        groups[name]["apply"].append({"targets": ["re:.*up_proj$"], "location": "weight_output"})

    def tensors(tensors):
        del tensors[f"{DOWN[1]}.{name}_input.weight"]
        key = f"{DOWN[0]}.{name}_input.weight"
        tensors[key] = tensors[key].T.contiguous()

    assert logits(read(edit(path, groups, tensors))).equal(logits(model))


def test_permuted_matrix(make, read, export, edit):
    path = export(make(hadamard(32)), custom_mode=CT)
    order = torch.randperm(32)
    edit(path, tensors=lambda t: t.update({f"{DOWN[0]}.hadamard_32_input.perm": order}))
    rotation = read(path).get_submodule(DOWN[0]).input_rotation
    assert rotation.equal(hadamard(32)[order][:, order]) and not rotation.equal(hadamard(32))


KEY = f"{DOWN[0]}.hadamard_32_input.weight"


def drop_matrices(tensors):
    for name in DOWN:
        del tensors[f"{name}.hadamard_32_input.weight"]


HOSTILE = {
    "location": (lambda g: g["apply"][0].update(location="output"), None, "location='output'"),
    "type": (lambda g: g.update(type="random-matrix"), None, "type='random-matrix'"),
    "size": (lambda g: g.update(head_dim=-1), None, "head_dim=-1 of hadamard_32 is no size"),
    "other size": (lambda g: g.update(head_dim=16), None, "16 x 16 is stored"),
    "apply": (lambda g: g.update(apply={"a": 1}), None, "is not a list of objects"),
    "targets": (lambda g: g["apply"][0].update(targets=[1]), None, "not a list of names"),
    "pattern": (lambda g: g["apply"][0].update(targets=["re:(a+)+"]), None, "is not supported"),
    "float layer": (lambda g: g["apply"][0]["targets"].append("lm_head"), None, "stored in float"),
    "twice": (lambda g: g["apply"].append(g["apply"][0]), None, "have two transforms"),
    "absent": (None, drop_matrices, "32 x 32 is stored"),
    "zero": (None, lambda t: t[KEY].zero_(), "is not orthogonal"),
    "NaN": (None, lambda t: t[KEY][0].fill_(torch.nan), "is not orthogonal"),
    "shape": (None, lambda t: t.update({KEY: torch.ones(3, 5)}), "32 x 32 is stored"),
    "other layer": (
        None,
        lambda t: t.update({KEY.replace("down", "up"): torch.eye(32)}),
        "is unexpected",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile(make, build, export, edit, case):
    group, tensors, said = HOSTILE[case]
    path = export(make(hadamard(32)), custom_mode=CT)
    edit(path, group and (lambda groups: group(groups["hadamard_32"])), tensors)
    model = build(device="meta")
    with pytest.raises(ValueError, match=said):
        ModelImporter(path, "safetensors").import_model_info(model)
    assert type(model.get_submodule(DOWN[0])) is torch.nn.Linear
