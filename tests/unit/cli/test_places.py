"""Paths that hold no model, or another one: the answer says what to type."""

import json
import shutil

import pytest

INT8 = ["--output_dir", "OUT", "--quant_scheme", "int8_wo"]
COPIES = ("MODEL", "NO-CONFIG", "NO-WEIGHTS", "NO-TYPE", "BROKEN", "POINTER", "SHARD")


@pytest.fixture
def places(model_dir, tmp_path, monkeypatch):
    """Directories that users take for models, beside a model."""
    monkeypatch.chdir(tmp_path)
    for name in COPIES:
        shutil.copytree(model_dir, name)
    (tmp_path / "NO-CONFIG/config.json").unlink()
    (tmp_path / "NO-WEIGHTS/model.safetensors").unlink()
    config = json.loads((tmp_path / "MODEL/config.json").read_text("utf-8"))
    del config["model_type"]
    (tmp_path / "NO-TYPE/config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "BROKEN/config.json").write_text('{"model_type":', encoding="utf-8")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "POINTER/model.safetensors").write_text(pointer, encoding="utf-8")
    index = json.dumps({"metadata": {}, "weight_map": {"a": "model-00002-of-00002.safetensors"}})
    (tmp_path / "SHARD/model.safetensors.index.json").write_text(index, encoding="utf-8")
    (tmp_path / "EMPTY").mkdir()
    for name, file in {"ADAPTER": "adapter_config.json", "PIPELINE": "model_index.json"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}", encoding="utf-8")
    (tmp_path / "PIPELINE/unet").mkdir()
    part = '{"_class_name": "UNet2DConditionModel"}'
    (tmp_path / "PIPELINE/unet/config.json").write_text(part, encoding="utf-8")
    shutil.copytree("MODEL", "models--an-owner--a-model/snapshots/1f")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")


@pytest.mark.parametrize(
    ("place", "code", "advice"),
    [
        ("NO-CONFIG", 2, "Copy it from the original model to this directory"),
        ("NO-TYPE", 2, "lacks model_type. Copy config.json from the original model"),
        ("NO-WEIGHTS", 1, "there is no model.safetensors or pytorch_model.bin. Copy the weights"),
        ("BROKEN", 1, "mend it, or copy it again"),
        ("POINTER", 1, "run 'git lfs pull' in POINTER"),
        ("SHARD", 1, "which its index names: copy it too"),
        ("EMPTY", 2, "download one with 'hf download OWNER/NAME --local-dir DIRECTORY'"),
        ("ADAPTER", 2, "from_pretrained('ADAPTER').merge_and_unload().save_pretrained('MERGED')"),
        ("PIPELINE", 2, "docs/other-models.md quantizes it in Python"),
        ("PIPELINE/unet", 1, "is a part of a pipeline of diffusers: docs/other-models.md"),
        ("models--an-owner--a-model", 2, "snapshots/1f, or the name an-owner/a-model"),
        ("cut.gguf", 1, "it ends too early. Copy it again."),
        ("https://huggingface.co/an-owner/a-model/tree/main", 2, "Give an-owner/a-model"),
        ("MODEL ", 2, "Did you mean 'MODEL'?"),
        ("'MODEL'", 2, "Did you mean 'MODEL'?"),
        ("MODLE", 2, "Did you mean 'MODEL'?"),
        ("~/MODEL", 2, "Write $HOME/MODEL"),
    ],
)
def test_a_place_without_a_model(place, code, advice, places, quark, tmp_path):
    result = quark("quantize", "--model_dir", place, *INT8)
    assert result.exit_code == code, result.output
    assert advice in " ".join(result.stderr.split())
    assert not (tmp_path / "OUT").exists()


@pytest.mark.parametrize(
    ("place", "advice"), [("ADAPTER", "merge_and_unload"), ("PIPELINE", "docs/other-models.md")]
)
def test_a_place_without_a_checkpoint(place, advice, places, quark):
    result = quark("inspect", place)
    assert (result.exit_code, advice in result.stderr) == (2, True), result.output


def test_an_architecture_that_transformers_does_not_know(places, quark, tmp_path):
    path = tmp_path / "MODEL/config.json"
    config = json.loads(path.read_text("utf-8")) | {"model_type": "later"}
    path.write_text(json.dumps(config), encoding="utf-8")
    result = quark("quantize", "--model_dir", "MODEL", *INT8, "--quant_algo", "gptq")
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "gptq runs the model, so it needs the model in memory. A later version may" in said
    assert "pip install --upgrade transformers" in said


@pytest.mark.parametrize("verb", ["report", "evaluate"])
def test_another_model_as_the_original(verb, places, quark, tmp_path):
    made = quark("quantize", "--model_dir", "MODEL", *INT8, "--skip_evaluation")
    assert made.exit_code == 0, made.output
    config = json.loads((tmp_path / "MODEL/config.json").read_text("utf-8"))
    config["num_hidden_layers"] += 1
    (tmp_path / "NO-WEIGHTS/config.json").write_text(json.dumps(config), encoding="utf-8")
    result = quark(verb, "OUT", "--original", "NO-WEIGHTS")
    assert result.exit_code == 2, result.output
    said = " ".join(result.stderr.split())
    assert "NO-WEIGHTS is another model: it has num_hidden_layers=3, and OUT has 2" in said


@pytest.mark.parametrize("name", ["MODEL/out", "a b/é 模型/out"])
def test_an_output_inside_of_the_model_or_with_any_name(name, places, quark, tmp_path):
    """The files are those of another output, and the model is not changed."""
    before = {f: f.read_bytes() for f in (tmp_path / "MODEL").iterdir()}
    call = ["quantize", "--model_dir", "MODEL", "--quant_scheme", "int8_wo", "--skip_evaluation"]
    for place in ("elsewhere", name):
        result = quark(*call, "--output_dir", place)
        assert result.exit_code == 0, result.output
    sums = [(tmp_path / place / "SHA256SUMS").read_text() for place in ("elsewhere", name)]
    sums = [text.partition("README.md\n")[2] for text in sums]  # whose lines name the directory
    assert sums[0] and sums[0] == sums[1]
    assert {f: f.read_bytes() for f in (tmp_path / "MODEL").iterdir() if f.is_file()} == before
    assert [f.name for f in (tmp_path / name).parent.iterdir() if f not in before] == ["out"]
