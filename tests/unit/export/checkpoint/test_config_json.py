"""What a checkpoint says of itself, wherever its tool wrote that, and models built from it."""

import json
from functools import reduce

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from quark.cli.main import app
from quark.cli.models import load_model
from quark.torch import (
    ModelExporter,
    ModelImporter,
    import_model_from_safetensors,
    load_params,
    save_params,
)
from quark.torch.export.checkpoint.config_json import read_config_json
from quark.torch.export.conversion import convert
from quark.torch.export.recognition import load_checkpoint, open_checkpoint
from quark.torch.quantization.config.config import Config, QuantizationConfig
from tests.configurations import half_groups

# What each tool wrote, and how.
OLDER = {
    "gptq": (
        "quantize_config.json",
        ("int4", True),
        {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "quant_method": None},
    ),
    "awq": (
        "quant_config.json",
        ("uint4", False),
        {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
    ),
}


@pytest.fixture
def older(build, quantize, tmp_path):
    """A model, and its checkpoint with settings beside config.json alone, as older tools wrote."""

    def older(method):
        file, weight, settings = OLDER[method]
        layer = QuantizationConfig(weight=half_groups(*weight))
        model = quantize(build(), Config(layer, exclude=["lm_head"]))
        path = tmp_path / method
        ModelExporter(path).export_safetensors_model(model, custom_mode=method)
        described = json.loads((path / "config.json").read_text())
        del described["quantization_config"]
        (path / "config.json").write_text(json.dumps(described))
        (path / file).write_text(json.dumps(settings))
        tensors = load_file(path / "model.safetensors")
        save_file(tensors, path / "gptq_model-4bit-32g.safetensors")
        (path / "model.safetensors").unlink()
        return model, path

    return older


def settle(path, **section):
    """Write settings into config.json too."""
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(described | {"quantization_config": section}))


class TestOlderTools:
    @pytest.mark.parametrize("method", OLDER)
    def test_settings_beside_the_configuration(self, older, build, logits, method):
        model, path = older(method)
        loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
        assert logits(loaded).equal(logits(model))
        assert logits(open_checkpoint(path).fill()).equal(logits(model))
        assert logits(load_checkpoint(path)).equal(logits(model))
        assert logits(load_model(path)).equal(logits(model))

    @pytest.mark.parametrize("method", OLDER)
    def test_they_are_written_into_it(self, older, tmp_path, method):
        _, path = older(method)
        convert(path, tmp_path / "out", method)
        assert not (tmp_path / "out" / OLDER[method][0]).exists()
        section = read_config_json(tmp_path / "out")["quantization_config"]
        assert (section["quant_method"], section["bits"], section["group_size"]) == (method, 4, 32)

    def test_inspect(self, older):
        result = CliRunner().invoke(app, ["inspect", str(older("gptq")[1]), "--json"])
        found = json.loads(result.stdout)
        assert found["quant_method"] == "gptq" and len(found["layers"]) == 14

    def test_another_method_than_the_usual(self, older, build, logits):
        """AutoGPTQ also wrote weights of AWQ."""
        model, path = older("awq")
        settings = json.loads((path / "quant_config.json").read_text())
        (path / "quant_config.json").unlink()
        (path / "quantize_config.json").write_text(json.dumps({**settings, "quant_method": "awq"}))
        assert logits(open_checkpoint(path).fill()).equal(logits(model))

    @pytest.mark.parametrize("method", OLDER)
    def test_both_files_may_agree(self, older, logits, method):
        model, path = older(method)
        settle(path, quant_method=method, bits=4, group_size=32)
        assert logits(open_checkpoint(path).fill()).equal(logits(model))

    @pytest.mark.parametrize(
        ("method", "section"),
        [
            ("gptq", {"group_size": 32, "bits": 8}),
            ("gptq", {"bits": 4, "group_size": 64}),
            ("gptq", {"bits": 4, "sym": False}),
            ("awq", {"bits": 3}),
            ("awq", {"zero_point": False}),
        ],
    )
    def test_or_disagree(self, older, method, section):
        _, path = older(method)
        settle(path, quant_method=method, **section)
        with pytest.raises(
            ValueError, match=rf"has {list(section)[-1]}=.*, but {OLDER[method][0]} has"
        ):
            open_checkpoint(path)

    @pytest.mark.parametrize("content", ["{", "[]", "7"])
    @pytest.mark.parametrize("name", ["config.json", "quantize_config.json"])
    def test_damaged(self, older, name, content):
        _, path = older("gptq")
        (path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name} (is not valid JSON|does not describe)"):
            open_checkpoint(path)


def change(file, changes, *keys):
    """Change a JSON file, in what these keys lead to."""
    described = json.loads(file.read_text())
    reduce(dict.__getitem__, keys, described).update(changes)
    file.write_text(json.dumps(described))


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 10**9}, {"hidden_size": -64}, {"model_type": "../llama"}],
    ids=str,
)
class TestHostileConfigurations:
    """No function that builds a model itself takes the word of a file for its size."""

    def test_import_model_from_safetensors(self, build, quantize, export, changes):
        path = export(quantize(build(), "int8"))
        change(path / "config.json", changes)
        with pytest.raises(ValueError, match=r"no model has more|cannot build the model"):
            import_model_from_safetensors(None, path)

    def test_load_params(self, build, quantize, tmp_path, changes):
        path = tmp_path / "params"
        save_params(quantize(build(), "int8"), "small", export_dir=path)
        change(path / "small.json", changes, "config")
        files = {"json_path": path / "small.json", "safetensors_path": path / "small.safetensors"}
        with pytest.raises(ValueError, match=r"no model has more|cannot build the model"):
            load_params(**files)


def test_what_transformers_would_build_layer_by_layer(build, quantize, export):
    path = export(quantize(build(), "int8"))
    change(path / "config.json", {"num_hidden_layers": 10**9})
    with pytest.raises(ValueError, match=r"num_hidden_layers=1000000000, but no model has more"):
        load_model(path)
