"""Damaged and hostile checkpoints: one clear error each, before a model is touched or filled.

Files are made here, one thing wrong in each. ``benchmarks/fuzz.py`` does the same at random.
"""

import json
import struct

import pytest
import torch

from quark.demo.text import model_directory
from quark.torch import ModelExporter
from quark.torch.export.formats.registry import FORMATS
from quark.torch.export.gguf.reader import GgufFile
from quark.torch.export.recognition import open_checkpoint
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec

LAYER = "model.layers.1.self_attn.k_proj"
WEIGHT = QuantizationSpec(
    "uint4", qscheme="per_group", ch_axis=-1, group_size=32, symmetric=False, is_dynamic=False
)
MODES = tuple(FORMATS)
SCHEMES = {"fp8": "fp8", "modelopt": "fp8", "mxfp8": "mxfp8"}  # others hold integers
SCALES = {"awq": "scales", "gptq": "scales", "mlx": "scales", "mxfp8": "weight_scale_inv"}
SCALES |= {"torchao": "_weight_scale"}
CODES = {"awq": "qweight", "gptq": "qweight", "compressed-tensors": "weight_packed"}
CODES |= {"torchao": "_weight_qdata"}
EXPERTS = "model.layers.1.mlp.experts.down_proj"  # stacked in MXFP4


def codes_of(mode):
    """Name of the codes of a layer."""
    return f"{EXPERTS}_blocks" if mode == "mxfp4" else f"{LAYER}.{CODES.get(mode, 'weight')}"


def scales_of(mode):
    """Name of the scales of a layer."""
    return f"{EXPERTS}_scales" if mode == "mxfp4" else f"{LAYER}.{SCALES.get(mode, 'weight_scale')}"


@pytest.fixture(scope="module")
def sound(build, quantize, tmp_path_factory):
    """The files of a checkpoint of each format, by name."""
    made = {}

    def sound(mode):
        if mode not in made:
            layer = scheme(SCHEMES[mode]) if mode in SCHEMES else QuantizationConfig(weight=WEIGHT)
            size = {"vocab_size": 2048} if mode == "gguf" else {}
            config = Config(layer, exclude=["lm_head"])
            if mode == "mxfp4":
                config = Config(layer_quant_config={"*.experts.*": scheme("mxfp4_weight_only")})
                size = {"num_local_experts": 2, "num_experts_per_tok": 1}
            model = quantize(build("gpt_oss" if mode == "mxfp4" else "llama", **size), config)
            exporter = ModelExporter(tmp_path_factory.mktemp("sound") / mode)
            if mode == "gguf":
                exporter.export_gguf_model(model, model_directory(), "model")
            else:
                exporter.export_safetensors_model(model, custom_mode=mode)
            files = [f for f in exporter.export_dir.iterdir() if f.is_file()]
            made[mode] = {file.name: file.read_bytes() for file in files}
        return dict(made[mode])

    return sound


@pytest.fixture
def refused(tmp_path):
    """Write files and open them, which must fail with one clear line and little memory."""

    def refused(files, said, error=ValueError):
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        with pytest.raises(error, match=said) as found:
            open_checkpoint(tmp_path).fill()
        assert "\n" not in str(found.value)
        return str(found.value)

    return refused


def header_of(data):
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(header, body):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def edited(files, change):
    """Change the header of the tensors."""
    header, body = header_of(files["model.safetensors"])
    change(header)
    return files | {"model.safetensors": with_header(header, body)}


def configured(files, change):
    """Change the configuration."""
    described = json.loads(files["config.json"])
    change(described)
    return files | {"config.json": json.dumps(described).encode()}


class TestTensors:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("kept", [0, 7, 100, -1])
    def test_truncated(self, sound, refused, mode, kept):
        files = sound(mode)
        files["model.safetensors"] = files["model.safetensors"][:kept]
        refused(files, "is damaged or not a safetensors file")

    @pytest.mark.parametrize("size", [0, 1 << 20, 1 << 40, (1 << 64) - 1])
    def test_lengths_of_the_header(self, sound, refused, size):
        files = sound("gptq")
        data = struct.pack("<Q", size) + files["model.safetensors"][8:]
        refused(files | {"model.safetensors": data}, "is damaged or not a safetensors file")

    @pytest.mark.parametrize(
        "change",
        [
            lambda e: e.update(data_offsets=[0, 1 << 60]),
            lambda e: e.update(data_offsets=[8, 0]),
            lambda e: e.update(shape=[1 << 40, 1 << 40]),
            lambda e: e.update(shape=[-1]),
            lambda e: e.update(shape="a"),
            lambda e: e.update(dtype="F7"),
            lambda e: e.pop("dtype"),
        ],
    )
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.sampled(3, covers=True)
    def test_entries_of_the_header(self, sound, refused, mode, change):
        name = codes_of(mode)
        refused(edited(sound(mode), lambda h: change(h[name])), "is damaged|unknown type")

    def test_a_name_that_is_there_twice(self, sound, refused):
        header, body = header_of(sound("awq")["model.safetensors"])
        text = json.dumps(header)
        name = json.dumps(f"{LAYER}.scales")
        doubled = text[:-1] + f", {name}: {json.dumps(header[f'{LAYER}.scales'])}" + "}"
        data = with_header(doubled.encode(), body)
        refused(sound("awq") | {"model.safetensors": data}, "scales' is there twice")

    def test_a_name_that_is_in_two_files(self, sound, refused):
        files = sound("awq")
        files |= {"a.safetensors": files["model.safetensors"]}
        files |= {"b.safetensors": files.pop("model.safetensors")}
        refused(files, r"is there twice, again in b\.safetensors")

    @pytest.mark.parametrize("mode", MODES)
    def test_no_scales(self, sound, refused, mode):
        layer = EXPERTS.replace(".down", ".0.down") if mode == "mxfp4" else LAYER

        def rename(header):
            header[f"{LAYER}.other"] = header.pop(scales_of(mode))

        refused(edited(sound(mode), rename), rf"does not fit .*{layer}\..* (is|are) missing")

    @pytest.mark.parametrize("mode", MODES)
    def test_codes_of_another_type_or_shape(self, sound, refused, mode):
        name = codes_of(mode)

        def turn(header):
            header[name]["shape"] = header[name]["shape"][::-1]

        def retype(header):
            kind = {"I32": "U32", "U32": "I32", "F8_E4M3": "I8", "U8": "I8", "I8": "U8"}[
                header[name]["dtype"]
            ]
            header[name]["dtype"] = kind

        refused(edited(sound(mode), retype), "unknown type|expected torch")
        if mode != "gptq":  # whose matrices are square here
            refused(edited(sound(mode), turn), "expected (torch|two integers)")


class TestIndex:
    @pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b", ".", "", "x"])
    def test_names_that_lead_elsewhere(self, sound, refused, file):
        index = json.dumps({"weight_map": {f"{LAYER}.weight": file}}).encode()
        files = sound("quark") | {"model.safetensors.index.json": index}
        refused(files, "which its index names", FileNotFoundError)

    @pytest.mark.parametrize("data", [b"", b"[]", b'{"weight_map": {"a": 1}}', b"[" * 100_000])
    def test_no_map(self, sound, refused, data):
        files = sound("quark") | {"model.safetensors.index.json": data}
        refused(files, "has no weight_map|is not valid JSON")


class TestConfiguration:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("hidden_size", "64"),
            ("hidden_size", -64),
            ("num_hidden_layers", 10**9),
            ("num_hidden_layers", None),
            ("vocab_size", 10**30),
            ("intermediate_size", 1 << 62),
            ("num_attention_heads", 0),
            ("model_type", "../llama"),
            ("model_type", ["llama"]),
            ("rope_parameters", {"rope_type": "x"}),
        ],
    )
    @pytest.mark.sampled(4, covers=True)
    def test_of_the_model(self, sound, refused, mode, key, value):
        refused(
            configured(sound(mode), lambda c: c.update({key: value})),
            f"{key}|cannot build the model it describes",
        )

    def test_a_name_that_is_there_twice(self, sound, refused):
        files = sound("gptq")
        data = files["config.json"].replace(b'"bits": 4', b'"bits": 4, "bits": 8')
        refused(files | {"config.json": data}, "'bits' is there twice")

    @pytest.mark.parametrize("value", [None, 7, "awq", [], {"quant_method": ["awq"]}, {"a": {}}])
    def test_of_the_quantization(self, sound, refused, value):
        files = configured(sound("awq"), lambda c: c.update(quantization_config=value))
        refused(files, "quantization|quant_method|does not fit|matches none")

    @pytest.mark.parametrize("mode", ["awq", "gptq"])
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("group_size", -2),
            ("group_size", 0),
            ("group_size", 7),
            ("group_size", 10**30),
            ("group_size", "32"),
            ("group_size", 32.0),
            ("group_size", None),
            ("bits", "4"),
            ("bits", 10**30),
            ("bits", -4),
            ("bits", [4]),
        ],
    )
    def test_of_integers(self, sound, refused, mode, key, value):
        files = configured(sound(mode), lambda c: c["quantization_config"].update({key: value}))
        refused(files, f"{key}=|does not fit|group_size|act order")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("group_size", -3),
            ("group_size", "a"),
            ("group_size", 10**30),
            ("num_bits", 10**9),
            ("num_bits", "4"),
            ("strategy", ["group"]),
            ("strategy", "x"),
            ("type", 3),
        ],
    )
    def test_of_compressed_tensors(self, sound, refused, key, value):
        def change(described):
            groups = described["quantization_config"]["config_groups"]
            groups["group_0"]["weights"][key] = value

        said = f"{key}|bits of type .* are not supported|is malformed|does not fit"
        refused(configured(sound("compressed-tensors"), change), said)

    @pytest.mark.parametrize("key", ["ignore", "config_groups"])
    @pytest.mark.parametrize("value", [7, "x", {"a": 1}, [[]], {"g": {"targets": 3}}])
    def test_lists_of_compressed_tensors(self, sound, refused, key, value):
        section = {key: value}
        change = lambda c: c["quantization_config"].update(section)  # noqa: E731
        refused(configured(sound("compressed-tensors"), change), f"{key}|targets is not a list")

    @pytest.mark.parametrize(
        "exclude", [0, [7], {}, {"a": 1}, [["lm_head"]], [None]], ids=lambda value: str(value)
    )
    def test_patterns(self, sound, refused, exclude):
        section = {"exclude": exclude}
        change = lambda c: c["quantization_config"].update(section)  # noqa: E731
        refused(configured(sound("quark"), change), "exclude is not a list of names")

    @pytest.mark.parametrize("size", [0, -32, 10**30, "32", 32.5])
    def test_groups(self, sound, refused, size):
        def change(described):
            layer = described["quantization_config"]["global_quant_config"]
            layer["weight"]["group_size"] = size

        refused(configured(sound("quark"), change), "group_size|does not fit")


def number(value, code="Q"):
    return struct.pack("<" + code, value)


def text(value):
    return number(len(value)) + value


HEAD = b"GGUF" + number(3, "I")
ENTRY = text(b"key") + number(4, "I") + number(1, "I")
TENSOR = text(b"a") + number(1, "I") + number(32) + number(0, "I") + number(0)


class TestGguf:
    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (b"", "it is empty"),
            (b"GGU", "ends too early"),
            (b"GGML" + bytes(64), "does not begin with GGUF"),
            (b"GGUF" + number(1, "I") + bytes(64), "its version is 1"),
            (HEAD, "ends too early"),
            (HEAD + number(1 << 62) + number(0), r"claims \d+ entries"),
            (HEAD + number(0) + number((1 << 64) - 1), r"claims \d+ entries"),
            (HEAD + number(0) + number(1) + number(1 << 63) + bytes(64), "ends too early"),
            (HEAD + number(0) + number(1) + text(b"\xff") + bytes(64), "is not UTF-8"),
            (HEAD + number(0) + number(2) + ENTRY + ENTRY, "key is there twice"),
            (HEAD + number(0) + number(1) + text(b"k") + number(99, "I") + bytes(64), "type 99"),
            (
                HEAD + number(0) + number(1) + text(b"k") + number(9, "I")
                + number(8, "I") + number(1 << 61) + bytes(64),
                r"claims \d+ entries",
            ),
            (
                HEAD + number(0) + number(1) + text(b"k") + number(9, "I")
                + number(9, "I") + number(1) + bytes(64),
                "type 9",
            ),
            (HEAD + number(2) + number(0) + TENSOR + TENSOR + bytes(256), "a is there twice"),
            (HEAD + number(1) + number(0) + TENSOR + bytes(32), "a reaches beyond its end"),
            (
                HEAD + number(1) + number(0) + text(b"a") + number(5, "I") + bytes(99),
                "or has 5 axes",
            ),
            (
                HEAD + number(1) + number(0) + text(b"a") + number(2, "I")
                + number(1 << 40) + number(1 << 40) + number(0, "I") + number(0) + bytes(99),
                "a reaches beyond its end",
            ),
            (
                HEAD + number(1) + number(0) + text(b"a") + number(1, "I")
                + number(31) + number(2, "I") + number(0) + bytes(99),
                r"a of type Q4_0 has the shape \[31\]",
            ),
            (
                HEAD + number(1) + number(0) + text(b"a") + number(1, "I")
                + number(32) + number(77, "I") + number(0) + bytes(99),
                "a is of the unknown type 77",
            ),
        ],
    )  # fmt: skip
    def test_headers(self, tmp_path, data, said):
        (tmp_path / "model.gguf").write_bytes(data)
        with pytest.raises(ValueError, match=said) as error:
            GgufFile(tmp_path / "model.gguf")
        assert "is damaged or not a supported GGUF file" in str(error.value)

    def test_a_sound_header(self, tmp_path):
        data = HEAD + number(1) + number(1) + ENTRY + TENSOR
        data += bytes(-len(data) % 32) + torch.arange(32.0).numpy().tobytes()
        (tmp_path / "model.gguf").write_bytes(data)
        file = GgufFile(tmp_path / "model.gguf")
        assert file.values == {"key": 1} and file.version == 3
        assert file.blocks("a").clone().view(torch.float32).equal(torch.arange(32.0))

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (b"llama.block_count", b"llama.block_cuont"),
            (b"blk.1.attn_q.weight", b"blk.7.attn_q.weight"),
            (b"output_norm.weight", b"output_nrom.weight"),
            (b"llama", b"lloma"),
        ],
    )
    def test_names(self, sound, refused, old, new):
        pytest.importorskip("gguf")
        data = sound("gguf")["model.gguf"]
        assert old in data
        refused({"model.gguf": data.replace(old, new)}, r"model\.gguf|lloma is not supported")

    @pytest.mark.parametrize("count", [0, 1, 3, 1 << 31])
    def test_blocks_that_are_not_there(self, sound, refused, count):
        pytest.importorskip("gguf")
        data = bytearray(sound("gguf")["model.gguf"])
        at = data.index(b"llama.block_count") + len(b"llama.block_count") + 4
        assert struct.unpack_from("<I", data, at) == (2,)
        struct.pack_into("<I", data, at, count)
        refused(
            {"model.gguf": bytes(data)},
            "does not fit|only .* tensors|cannot build|no place|no model has more",
        )

    def test_several_files(self, sound, refused):
        pytest.importorskip("gguf")
        data = sound("gguf")["model.gguf"]
        refused({"a.gguf": data, "b.gguf": data}, "has 2 GGUF files: name one")
