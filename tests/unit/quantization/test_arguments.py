"""Arguments of other kinds: each ends in a sentence that says what to give."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from quark.torch import (
    LLMTemplate,
    ModelExporter,
    ModelImporter,
    ModelQuantizer,
    import_model_from_safetensors,
)
from quark.torch.quantization.config.config import AWQConfig, GPTQConfig
from tests.configurations import preset


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        (None, r"got None: make one: LLMTemplate\.get\(model\.config\.model_type\)"),
        ({"global_quant_config": {}}, r"got a dict: give Config\.from_dict\(config\)"),
        ("fp8", r"got a str: make one: .*\.get_config\('fp8'\)"),
        (LLMTemplate, r"got the class LLMTemplate: make one"),
    ],
    ids=["None", "dict", "name", "class"],
)
def test_a_configuration_of_another_kind(config, advice):
    with pytest.raises(TypeError, match=advice):
        ModelQuantizer(config)


class Pipeline:
    """Holds a model, as a pipeline of Transformers does."""

    model = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (None, "got None: give a model of torch"),
        ([torch.ones(1, 4)], "got a list: give the model first, then the batches"),
        ("llama", r"got a str: load it first: AutoModelForCausalLM\.from_pretrained\('llama'\)"),
        (nn.Linear, r"got the class Linear: make one: Linear\.from_pretrained\(DIRECTORY\)"),
        (Pipeline(), r"got a Pipeline: give its model, in \.model"),
    ],
    ids=["None", "swapped", "name", "class", "pipeline"],
)
def test_a_model_of_another_kind(model, advice):
    with pytest.raises(TypeError, match=advice):
        ModelQuantizer(preset("int8_wo")).quantize_model(model)


@pytest.mark.parametrize(
    "use",
    [
        ModelQuantizer.freeze,
        lambda model: ModelExporter("out").export_safetensors_model(model),
        lambda model: ModelImporter(".").import_model_info(model),
    ],
    ids=["freeze", "export", "import"],
)
def test_a_path_in_place_of_a_model(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "quark"}}')
    save_file({"x": torch.ones(1)}, "model.safetensors")
    with pytest.raises(TypeError, match=r"got a str: load it first: .*from_pretrained\('llama'\)"):
        use("llama")


def test_a_model_in_place_of_a_directory():
    with pytest.raises(TypeError, match="model_dir: expected the directory of a checkpoint, got"):
        import_model_from_safetensors("llama", nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"model_info_dir: expected .* got None"):
        ModelImporter(None)


def test_options_of_an_algorithm_that_is_not_applied(caplog):
    template, options = LLMTemplate("llama"), {"gptq": GPTQConfig(), "awq": AWQConfig()}
    config = template.get_config("int4_wo_32", algorithm="gptq", algo_configs=options)
    assert config.algo_config == [options["gptq"]]
    [said] = [record.getMessage() for record in caplog.records]
    assert said == "algo_configs: awq is not applied: name it in algorithm, too."
    with pytest.raises(TypeError, match=r"options of gptq are a dict: give GPTQConfig\(…\)"):
        template.get_config("int4_wo_32", algorithm="gptq", algo_configs={"gptq": {}})


def test_patterns_that_are_none():
    with pytest.raises(TypeError, match="exclude_layers: expected a text or a list, got 3"):
        LLMTemplate("llama").get_config("int4_wo_32", exclude_layers=3)


def test_a_single_pattern_is_one_pattern():
    """Not one for each of its characters, none of which names a layer."""
    template = LLMTemplate("llama", kv_layers_name="*k_proj")
    config = template.get_config("int4_wo_32", exclude_layers="lm_head", float_parts="router")
    assert config.exclude == ["lm_head"] and config.float_parts == ["router"]
    assert template.kv_layers_name == ["*k_proj"]


@pytest.mark.parametrize("model_type", [None, nn.Linear(4, 4)], ids=["None", "model"])
def test_a_type_of_a_model_that_is_no_text(model_type):
    with pytest.raises(TypeError, match=r"Give model\.config\.model_type"):
        LLMTemplate.get(model_type)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"tokenizer": "llama"}, r"Load it: AutoTokenizer\.from_pretrained\('llama'\)"),
        ({"quant_config": "llama"}, "Leave it out: the model remembers it"),
    ],
    ids=["tokenizer", "quant_config"],
)
def test_an_argument_of_an_export_of_another_kind(options, advice, tmp_path):
    with pytest.raises(TypeError, match=advice):
        ModelExporter(tmp_path / "out").export_safetensors_model(nn.Linear(4, 4), **options)


def test_a_configuration_in_place_of_options_of_an_export(tmp_path):
    with pytest.raises(TypeError, match="config: expected an ExporterConfig, got a Config"):
        ModelExporter(preset("int8_wo"), tmp_path)
