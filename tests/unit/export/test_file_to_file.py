"""What is quantized from files to files is what a model in memory gives, byte for byte."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from quark.torch import ModelExporter, ModelQuantizer
from quark.torch.digests import compare_digests
from quark.torch.export import file_work
from quark.torch.export.checkpoint.architecture import empty_model
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.containers.safetensors import CopiedFiles
from quark.torch.export.file_to_file import quantize_files
from quark.torch.export.recognition import load_checkpoint
from quark.torch.quantization.config.algo import AWQConfig
from quark.torch.quantization.config.builder import build_config
from quark.torch.quantization.config.presets import scheme
from tests.models.architectures import build, small_config, varied

TYPES = {"mixtral": torch.float16, "tied": torch.float32}  # others: bfloat16


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Make the directory of a model, once."""
    made = {}

    def source(name="llama", size="5GB", **changes):
        key = (name, size, *changes.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            model = varied(name, TYPES.get(name, torch.bfloat16), **changes)
            model.generation_config.max_length = 33
            model.save_pretrained(made[key], max_shard_size=size)
            (made[key] / "tokenizer_config.json").write_text("{}")
        return made[key]

    return source


def config_of(name, exclude=("lm_head",), **rest):
    return build_config(scheme(name, 16), exclude=list(exclude), **rest)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def in_memory(config, source, target, mode="quark", size="5GB", options=None):
    model = load_checkpoint(source)
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
    exporter = ModelExporter(options, target)
    exporter.export_safetensors_model(
        model, custom_mode=mode, tokenizer=CopiedFiles(source), max_shard_size=size
    )
    return contents(target)


def from_files(config, source, target, mode="quark", size="5GB", **rest):
    settings = ExportSettings(
        custom_mode=mode, tokenizer=CopiedFiles(source), max_shard_size=size, **rest
    )
    quantize_files(config, source, target, settings)
    return contents(target)


@pytest.fixture
def compare(tmp_path):
    def compare(config, source, **options):
        files = from_files(config, source, tmp_path / "files", **options)
        assert files == in_memory(config, source, tmp_path / "memory", **options)
        return files

    return compare


class TestTheBytesOfMemory:
    @pytest.mark.parametrize(
        "name", ["int8_wo", "ptpc_fp8", "mxfp4", "w_int4_per_group_asym", "w_mx6", "bfloat16"]
    )
    def test_schemes(self, name, source, compare):
        files = compare(config_of(name), source())
        assert {"model.safetensors", "config.json", "tokenizer_config.json"} < files.keys()
        assert json.loads(files["generation_config.json"])["max_length"] == 33

    @pytest.mark.parametrize(
        "name", ["tied", "biases", "mixtral", "llama4", "gpt2", "nemotron"], ids=lambda name: name
    )
    def test_architectures_in_several_shards(self, name, source, compare):
        files = compare(config_of("int4_wo_per_channel"), source(name, "40KB"), size=10_000)
        assert len([name for name in files if name.endswith(".safetensors")]) > 2

    def test_a_quantized_head_that_was_tied(self, source, compare):
        files = compare(config_of("int8_wo", exclude=[]), source("tied"))
        assert json.loads(files["config.json"])["tie_word_embeddings"] is False

    @pytest.mark.parametrize("name", ["llama", "tied"])
    def test_a_quantized_embedding(self, name, source, compare):
        embeddings = {nn.Embedding: scheme("int8_wo")}
        config = replace(config_of("int8_wo"), layer_type_quant_config=embeddings)
        files = compare(config, source(name))
        assert b"model.embed_tokens.weight_scale" in files["model.safetensors"]

    @pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
    def test_scales_that_layers_share(self, name, source, compare, tmp_path):
        compare(config_of("nvfp4_weight_only"), source(name))
        tensors = load_file(tmp_path / "files" / "model.safetensors")
        scales = [tensors[f"model.layers.0.self_attn.{n}_proj.weight_scale_2"] for n in "qkv"]
        assert torch.equal(scales[0], scales[1]) and torch.equal(scales[1], scales[2])

    @pytest.mark.parametrize("name", ["mixtral", "llama4"])
    def test_some_experts(self, name, source, compare):
        """The float ones are split too, or stay stacked where a layer has no other."""
        exclude = ["lm_head", "*.layers.0.*experts.[01].*", "*.layers.1.*experts.*"]
        compare(config_of("int8_wo", exclude), source(name))

    @pytest.mark.parametrize(
        ("mode", "name"),
        [
            ("awq", "w_uint4_per_group_asym"),
            ("gptq", "w_int4_per_group_sym"),
            ("compressed-tensors", "ptpc_fp8"),
        ],
    )
    def test_formats(self, mode, name, source, compare):
        files = compare(config_of(name), source(), mode=mode)
        assert json.loads(files["config.json"])["quantization_config"]["quant_method"] == mode

    def test_another_type_than_that_of_the_files(self, source, compare, tmp_path):
        shutil.copytree(source(), tmp_path / "source")
        file = tmp_path / "source" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float16"}))
        compare(config_of("int8_wo"), tmp_path / "source")

    def test_no_type_in_config_json(self, source, compare, tmp_path):
        shutil.copytree(source(), tmp_path / "source")
        file = tmp_path / "source" / "config.json"
        described = json.loads(file.read_text())
        del described["dtype"]
        file.write_text(json.dumps(described))
        compare(config_of("int8_wo"), tmp_path / "source")

    @pytest.mark.parametrize("differ", [False, True])
    def test_tied_tensors_that_are_both_stored(self, differ, source, compare, tmp_path):
        shutil.copytree(source("tied"), tmp_path / "source")
        file = tmp_path / "source" / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + float(differ)
        save_file(tensors, file, metadata={"format": "pt"})
        compare(config_of("int8_wo"), tmp_path / "source")
        written = load_file(tmp_path / "files" / "model.safetensors")
        assert ("lm_head.weight" in written) is differ

    def test_any_number_of_threads(self, source, tmp_path):
        config, path = config_of("int8_wo"), source("mixtral")
        first = from_files(config, path, tmp_path / "one")
        torch.set_num_threads(4)
        assert from_files(config, path, tmp_path / "four") == first
        assert torch.get_num_threads() == 4


class TestTheMethod:
    def test_it_writes_the_checkpoint(self, source, tmp_path):
        config = config_of("int8_wo")
        done = ModelQuantizer(config).direct_quantize_checkpoint(
            str(source()), str(tmp_path / "files"), device=["cpu", "cpu"]
        )
        assert done is None
        assert contents(tmp_path / "files") == in_memory(config, source(), tmp_path / "memory")
        assert set(compare_digests(tmp_path / "files").values()) == {"ok"}

    @pytest.mark.parametrize("keeps", [False, True])
    def test_types_of_excluded_layers(self, keeps, source, tmp_path):
        shutil.copytree(source(), tmp_path / "source")
        file = tmp_path / "source" / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
        save_file(tensors, file, metadata={"format": "pt"})
        quantizer = ModelQuantizer(config_of("int8_wo"))
        quantizer.direct_quantize_checkpoint(tmp_path / "source", tmp_path / "out", keeps, "cpu")
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert written["lm_head.weight"].dtype == (torch.float32 if keeps else torch.bfloat16)
        assert written["model.norm.weight"].dtype == torch.bfloat16

    def test_the_flow_of_the_configuration(self, source, tmp_path):
        config = config_of("int8_wo")
        config.quant_flow = type(config.quant_flow).file2file
        ModelQuantizer(config).direct_quantize_checkpoint(source(), tmp_path / "files")
        plain = in_memory(config_of("int8_wo"), source(), tmp_path / "memory")
        assert contents(tmp_path / "files") == plain
        with pytest.raises(ValueError, match="call direct_quantize_checkpoint for file2file"):
            ModelQuantizer(config).quantize_model(load_checkpoint(source()))

    @pytest.mark.parametrize(
        "options", [{"weight_converters": [1]}, {"presharded_weights": {"a": 1}}]
    )
    def test_options_that_are_not_supported(self, options, source, tmp_path):
        with pytest.raises(ValueError, match=f"{next(iter(options))} is not supported"):
            ModelQuantizer(config_of("int8_wo")).direct_quantize_checkpoint(
                source(), tmp_path / "out", **options
            )
        with pytest.raises(TypeError, match="Give one device"):
            ModelQuantizer(config_of("int8_wo")).direct_quantize_checkpoint(
                source(), tmp_path / "out", False, "cpu", "cpu"
            )


class TestAnArchitectureThatIsNotKnown:
    @pytest.fixture
    def renamed(self, source, tmp_path):
        def renamed(name):
            path = tmp_path / "renamed"
            shutil.copytree(source(name, vocab_size=72), path)
            described = json.loads((path / "config.json").read_text())
            described |= {"model_type": "new_kind", "architectures": ["NewForCausalLM"]}
            (path / "config.json").write_text(json.dumps(described))
            return path

        return renamed

    @pytest.mark.parametrize("name", ["llama", "mixtral"])
    def test_layers_are_told_by_names_and_shapes(self, name, renamed, source, tmp_path, caplog):
        config = config_of("int8_wo", float_parts=["router"])
        files = from_files(config, renamed(name), tmp_path / "files")
        known = in_memory(config, source(name, vocab_size=72), tmp_path / "memory")
        tensors = [load_file(tmp_path / d / "model.safetensors") for d in ("files", "memory")]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
        described, expected = (json.loads(x["config.json"]) for x in (files, known))
        assert described["architectures"] == ["NewForCausalLM"]
        assert described["vocab_size"] == 72
        sections = [d["quantization_config"] for d in (described, expected)]
        assert sections[0]["global_quant_config"] == sections[1]["global_quant_config"]
        assert "Linear layers: " in caplog.text and "embed_tokens.weight (1)" in caplog.text

    def test_a_head_of_another_name(self, renamed, tmp_path):
        path = renamed("llama")
        tensors = load_file(path / "model.safetensors")
        tensors["output.weight"] = tensors.pop("lm_head.weight")
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        from_files(config_of("int8_wo"), path, tmp_path / "files")
        written = load_file(tmp_path / "files" / "model.safetensors")
        assert written["output.weight"].dtype == torch.bfloat16
        assert written["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8

    def test_a_name_that_no_module_has(self, renamed, tmp_path):
        path = renamed("llama")
        save_file({"a.training.weight": torch.ones(2, 2)}, path / "model.safetensors")
        with pytest.raises(ValueError, match=r"'a\.training\.weight' is not the name of a tensor"):
            from_files(config_of("int8_wo"), path, tmp_path / "files")


class TestRefused:
    def refused(self, config, source, tmp_path, message, error=ValueError):
        (tmp_path / "out").mkdir()
        before = sorted(tmp_path.iterdir())
        with pytest.raises(error, match=message):
            from_files(config, source, tmp_path / "out")
        assert sorted(tmp_path.iterdir()) == before and not any((tmp_path / "out").iterdir())

    def test_what_needs_a_model(self, source, tmp_path, monkeypatch):
        monkeypatch.setattr("quark.torch.export.file_to_file.open_in_float", None)
        message = "static activation scales are calibrated on data"
        self.refused(config_of("fp8"), source(), tmp_path, message)
        shutil.rmtree(tmp_path / "out")
        config = config_of("int8_wo", algorithms=[AWQConfig()])
        self.refused(config, source(), tmp_path, "awq runs the model. Load the model and")

    def test_layers_that_do_not_fit(self, source, tmp_path):
        message = "group_size=10 does not divide"
        config = build_config(scheme("w_int4_per_group_asym", 10), exclude=["lm_head"])
        self.refused(config, source(), tmp_path, message)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq' is unknown"),
            ({"model_type": "unheard"}, "does not know its architecture 'unheard'"),
        ],
    )
    def test_a_model_that_is_quantized_otherwise(self, change, message, source, tmp_path):
        from_files(config_of("int8_wo"), source(), tmp_path / "first")
        file = tmp_path / "first" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        self.refused(config_of("int8_wo"), tmp_path / "first", tmp_path, message)

    @pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
    def test_values_that_are_not_finite(self, name, source, tmp_path):
        shutil.copytree(source(), tmp_path / "source")
        file = tmp_path / "source" / "model.safetensors"
        tensors = load_file(file)
        tensors[name].view(-1)[3] = float("nan")
        save_file(tensors, file, metadata={"format": "pt"})
        message = f"{name} has NaN or infinite values"
        self.refused(config_of("int8_wo"), tmp_path / "source", tmp_path, message)

    @pytest.mark.parametrize("damage", ["missing", "truncated", "absent"])
    def test_damaged_files(self, damage, source, tmp_path):
        shutil.copytree(source("llama", "40KB"), tmp_path / "source")
        file = sorted((tmp_path / "source").glob("*.safetensors"))[1]
        error, message = ValueError, "is damaged or not a safetensors file"
        if damage == "missing":
            file.unlink()
            error, message = FileNotFoundError, f"lacks {file.name}"
        elif damage == "truncated":
            file.write_bytes(file.read_bytes()[:-1])
        else:
            tensors = load_file(file)
            tensors.pop(next(iter(tensors)))
            save_file(tensors, file, metadata={"format": "pt"})
            message = "missing"
        self.refused(config_of("int8_wo"), tmp_path / "source", tmp_path, message, error)


def test_an_earlier_output_stays_until_the_new_one_is_complete(source, tmp_path, monkeypatch):
    target = tmp_path / "out"
    first = from_files(config_of("int8_wo"), source(), target)
    with pytest.raises(FileExistsError, match="already exists"):
        from_files(config_of("int4_wo_per_channel"), source(), target)

    def stop(*args):
        raise KeyboardInterrupt

    settings = ExportSettings(tokenizer=CopiedFiles(source()))
    with monkeypatch.context() as patched:
        patched.setattr(file_work.ShardWriter, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_files(config_of("mxfp4"), source(), target, settings, overwrite=True)
    assert contents(target) == first and [p.name for p in tmp_path.iterdir()] == ["out"]
    quantize_files(config_of("mxfp4"), source(), target, settings, overwrite=True)
    assert contents(target) != first


def test_the_model_without_values_is_the_one_that_is_loaded(source):
    """``open_float_model`` has no values: the test of types and buffers is that they are equal."""
    from quark.torch.export.checkpoint.float_source import open_float_model

    loaded = load_checkpoint(source("mixtral"))
    model, _ = open_float_model(source("mixtral"))
    assert all(parameter.is_meta for parameter in model.parameters())
    expected = {n: (t.shape, t.dtype) for n, t in loaded.state_dict().items()}
    assert {n: (t.shape, t.dtype) for n, t in model.state_dict().items()} == expected
    plain = empty_model(AutoConfig.from_pretrained(source("mixtral")), model.state_dict(), source())
    assert type(plain) is type(model) is type(loaded)


@pytest.mark.parametrize("name", ["llama", "mixtral", "tied"])
def test_tensors_in_float_are_copied_in_parts(name, source, tmp_path, monkeypatch):
    config = config_of("int4_wo_per_channel")
    quantize_files(config, source(name), tmp_path / "whole", ExportSettings())
    monkeypatch.setattr(file_work, "PART", 300)
    parts = []
    check = file_work.check_finite
    monkeypatch.setattr(
        file_work, "check_finite", lambda n, x: parts.append((n, x.nbytes)) or check(n, x)
    )
    quantize_files(config, source(name), tmp_path / "parts", ExportSettings())
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    embedding = [size for n, size in parts if n == "model.embed_tokens.weight"]
    assert len(embedding) > 3 and max(embedding) <= 300


def test_a_part_that_is_not_finite(source, tmp_path, monkeypatch):
    directory = shutil.copytree(source(), tmp_path / "source")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1, -1] = float("nan")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(file_work, "PART", 300)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight has NaN"):
        quantize_files(
            config_of("int4_wo_per_channel"), directory, tmp_path / "out", ExportSettings()
        )
    assert not (tmp_path / "out").exists()


def test_layers_that_are_not_called_keep_their_inputs_in_float(compare, tmp_path):
    """Without data, zeros run through the names and shapes of the files."""
    build(small_config("mamba"), torch.float32).save_pretrained(tmp_path / "mamba")
    files = compare(config_of("ptpc_int8"), tmp_path / "mamba")
    section = json.loads(files["config.json"])["quantization_config"]
    inputs = {name: c["input_tensors"] for name, c in section["layer_quant_config"].items()}
    assert inputs == {"backbone.layers.*.mixer.dt_proj": None}
