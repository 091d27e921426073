"""From any format to any other that can hold a model: the same codes, or an error before work."""

import json

import pytest
import torch
from typer.testing import CliRunner

from quark.cli.main import app
from quark.torch import ModelExporter
from quark.torch.export import convert
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.recognition import open_checkpoint
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from tests.configurations import half_groups

LAYER = "model.layers.1.self_attn.k_proj"
CT = "compressed-tensors"
FP8 = QuantizationSpec("fp8_e4m3", qscheme="per_tensor", is_dynamic=False)


def weights(dtype, symmetric):
    weight = half_groups(dtype, symmetric)
    return Config(QuantizationConfig(weight=weight), exclude=["lm_head"])


BLOCKS = Config(
    QuantizationConfig(
        weight=QuantizationSpec(
            "fp8_e4m3", qscheme="per_block", block_size=(32, 32), is_dynamic=False
        ),
        input_tensors=QuantizationSpec(
            "fp8_e4m3", qscheme="per_group", ch_axis=-1, group_size=32, is_dynamic=True
        ),
    ),
    exclude=["lm_head"],
)
# Name -> configuration, the formats that hold it.
CASES = {
    "int4": (weights("int4", True), ("quark", "awq", "gptq", CT)),
    "uint4": (weights("uint4", False), ("quark", "awq", "gptq", CT)),
    "int8": (weights("int8", True), ("quark", "gptq", CT)),
    "int3": (weights("int3", True), ("quark", "gptq", CT)),
    "fp8": (
        Config(QuantizationConfig(weight=FP8, input_tensors=FP8), exclude=["lm_head"]),
        ("quark", CT, "fp8"),
    ),
    "fp8 blocks": (BLOCKS, ("quark", CT, "fp8")),
}
PAIRS = [
    (case, one, two)
    for case, (_, formats) in CASES.items()
    for one in formats
    for two in formats
    if one != two
]


@pytest.fixture(scope="module")
def made(build, quantize, tmp_path_factory):
    """A frozen model, and its checkpoint in a format."""
    done = {}

    def made(case, mode="quark"):
        if (case, mode) not in done:
            model = quantize(build(), CASES[case][0])
            path = tmp_path_factory.mktemp("made") / "model"
            ModelExporter(path).export_safetensors_model(model, custom_mode=mode)
            done[case, mode] = model, path
        return done[case, mode]

    return made


def numbers(state):
    """What the codes of a tensor stand for, whatever their sign, and their scales."""
    codes = state.codes.float()
    if state.zero_point is not None:
        zeros = state.zero_point.float().reshape(*state.scale.shape)
        if zeros.dim():
            zeros = zeros.reshape(len(codes), -1)
            zeros = zeros.repeat_interleave(codes.shape[1] // zeros.shape[1], 1)
        codes = codes - zeros
    return codes, state.scale.float()


@pytest.mark.parametrize(("case", "one", "two"), PAIRS)
@pytest.mark.sampled(8)
def test_codes_and_scales_stay(made, logits, tmp_path, case, one, two):
    model, path = made(case, one)
    verdict = convert(path, tmp_path / "out", two, verify=True)
    loaded = open_checkpoint(tmp_path / "out").fill()
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            before = numbers(layer.quantized_tensor("weight"))
            after = numbers(loaded.get_submodule(name).quantized_tensor("weight"))
            assert all(x.equal(y) for x, y in zip(before, after, strict=True)), name
    assert logits(loaded).equal(logits(model)) and verdict.spread > 0


def test_there_and_back_is_the_same_file(made, tmp_path):
    _, path = made("uint4", "awq")
    for here, there, mode in ((path, "a", "gptq"), (tmp_path / "a", "b", CT)):
        convert(here, tmp_path / there, mode)
    convert(tmp_path / "b", tmp_path / "c", "awq")
    files = [place / "model.safetensors" for place in (path, tmp_path / "c")]
    assert files[0].read_bytes() == files[1].read_bytes()


class TestRefused:
    def test_all_layers_are_told_apart_by_reason_before_anything_is_read(
        self, build, quantize, tmp_path, monkeypatch
    ):
        wide = QuantizationConfig(weight=weights("int8", True).global_quant_config.weight)
        configuration = weights("int4", True)
        configuration.layer_quant_config["*down_proj"] = wide
        configuration.layer_quant_config["*up_proj"] = QuantizationConfig(weight=FP8)
        model = quantize(build(), configuration)
        ModelExporter(tmp_path / "in").export_safetensors_model(model)
        monkeypatch.setattr(CheckpointReader, "tensors", lambda self: pytest.fail("tensors read"))
        with pytest.raises(ValueError, match="cannot hold") as error:
            convert(tmp_path / "in", tmp_path / "out", "awq")
        said = str(error.value)
        assert "mlp.up_proj and 1 more: its weight is fp8_e4m3" in said
        assert "mlp.down_proj and 1 more: its weight is int8" in said
        assert "gate_proj" not in said and not (tmp_path / "out").exists()

    def test_an_unknown_format(self, made, tmp_path):
        with pytest.raises(ValueError, match=r"to: 'gptqq' is unknown\. Did you mean 'gptq'"):
            convert(made("int4")[1], tmp_path / "out", "gptqq")

    def test_a_target_in_use(self, made, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "model_state_dict.pth").touch()
        with pytest.raises(FileExistsError, match="already exists"):
            convert(made("int4")[1], tmp_path / "out", "gptq")
        convert(made("int4")[1], tmp_path / "out", "gptq", overwrite=True)
        assert not (tmp_path / "out" / "model_state_dict.pth").exists()

    @pytest.mark.parametrize("up", [0, 1])
    def test_a_target_that_holds_the_source(self, made, up):
        path = made("int4")[1]
        with pytest.raises(ValueError, match="holds the checkpoint itself"):
            convert(path, [path, *path.parents][up], "gptq", overwrite=True)
        assert (path / "config.json").is_file()

    def test_a_float_model(self, build, tmp_path):
        build().save_pretrained(tmp_path / "in")
        with pytest.raises(ValueError, match="this is not a quantized checkpoint"):
            convert(tmp_path / "in", tmp_path / "out", "gptq")


def test_files_beside_the_weights_come_along(made, tmp_path):
    import shutil

    source = tmp_path / "in"
    shutil.copytree(made("int4", "awq")[1], source)
    for name in ("tokenizer.json", "chat_template.jinja", "quant_config.json", "notes.bin"):
        (source / name).write_text("{}")
    convert(source, tmp_path / "out", "gptq")
    found = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "chat_template.jinja"} <= found
    assert not {"quant_config.json", "notes.bin"} & found
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "gptq"


def test_the_native_format(build, quantize, logits, tmp_path):
    model = quantize(build(), CASES["int4"][0])
    ModelExporter(tmp_path / "in").export_quark_model(model)
    convert(tmp_path / "in", tmp_path / "out", CT)
    assert logits(open_checkpoint(tmp_path / "out").fill()).equal(logits(model))


def test_experts_under_other_names(build, quantize, logits, tmp_path):
    several = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = quantize(build("mixtral", **several), CASES["uint4"][0])
    ModelExporter(tmp_path / "in").export_safetensors_model(model, custom_mode="awq")
    convert(tmp_path / "in", tmp_path / "out", CT, verify=True)
    assert logits(open_checkpoint(tmp_path / "out").fill()).equal(logits(model))


class TestCommandLine:
    def run(self, *arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    def test_convert(self, made, tmp_path):
        path = made("uint4", "awq")[1]
        result = self.run("convert", path, tmp_path / "out", "--to", "quark", "--verify")
        assert result.exit_code == 0, result.output
        assert "verified" in result.output and "opened by transformers" in result.output
        assert (tmp_path / "out" / "model.safetensors").is_file()

    @pytest.mark.parametrize(("to", "code", "said"), [("fp8", 1, "cannot hold"), ("x", 2, "--to")])
    def test_refused(self, made, tmp_path, to, code, said):
        result = self.run("convert", made("int4")[1], tmp_path / "out", "--to", to)
        assert result.exit_code == code and said in result.stderr
        assert not (tmp_path / "out").exists()

    def test_nothing_there(self, tmp_path):
        result = self.run("convert", tmp_path / "in", tmp_path / "out", "--to", "awq")
        assert result.exit_code == 2 and "there is no" in result.stderr

    @pytest.mark.parametrize(
        ("case", "mode", "bits"),
        [
            # codes, a scale of 16 bits, and a zero point for each 32 inputs
            ("uint4", "awq", 4 + (16 + 4) / 32),
            ("int8", CT, 8 + 16 / 32),
            ("fp8", "fp8", 8),
        ],
    )
    def test_inspect(self, made, case, mode, bits):
        result = self.run("inspect", made(case, mode)[1], "--json")
        found = json.loads(result.stdout)
        assert len(found["layers"]) == 14 and found["quant_method"] == mode and not found["note"]
        assert found["bits_per_weight"] == pytest.approx(bits, abs=0.1)
        stored = CheckpointReader(made(case, mode)[1]).entries.values()
        sizes = (torch.empty(e.shape, dtype=e.dtype, device="meta").nbytes for e in stored)
        assert found["bytes"] == sum(sizes)
        assert found["parameters"] == sum(p.numel() for p in made(case)[0].parameters())
