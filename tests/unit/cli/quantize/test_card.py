"""The model card beside a checkpoint says how it was made, and nothing of the machine."""

import hashlib
import re
import shutil

import pytest
from huggingface_hub import metadata_load

from quark.cli.quantize.card import original_name, place_name
from quark.torch.digests import DIGESTS


def rows(path):
    """The table of a card, by title."""
    lines = (path / "README.md").read_text("utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return dict(cell for cell in cells if len(cell) == 2)


def test_card(quantize, model_dir, text):
    path, printed = quantize("--quant_scheme", "int4_wo_32", "--quant_algo", "gptq", evaluated=True)
    card = (path / "README.md").read_text("utf-8")
    assert metadata_load(path / "README.md") == {
        "base_model": "llama",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "tags": ["quark", "quantized", "int4_wo_32"],
    }
    table = rows(path)
    digest = table.pop("digest of the data")
    assert len(digest) == 18
    count, words = table["calibration"].split(" ", 1)
    assert 1 < int(count) < 20
    assert words == "windows of 64 tokens: text.txt"
    perplexity = next(x for x in printed.splitlines() if "perplexity  " in x).split()
    assert re.fullmatch(
        r"\d+\.\d\d → \d+\.\d\d \([+-]\d+\.\d % ± \d+\.\d %\)", " ".join(perplexity[1:])
    )
    assert table == {
        "scheme": "int4_wo_32",
        "weights": "int4 per group 32 sym",
        "algorithms": "gptq",
        "in float": "the output head",
        "calibration": table["calibration"],
        "letters calibrated": "Latin 100.0 %",
        "layers": "14 quantized",
        "bits per weight": next(x for x in printed.splitlines() if "bits per" in x).split()[-1],
        "size": table["size"],
        "perplexity": f"{' '.join(perplexity[1:])} on text.txt",
    }
    assert 'AutoModelForCausalLM.from_pretrained("path/to/this/directory")' in card
    assert "The package of Quark must be installed.\n\n```python\nimport transformers\n" in card
    assert "```bash\nvllm serve path/to/this/directory\n```" in card
    for other in ("gguf", "onnx"):
        command = f"quark convert path/to/this/directory {other.upper()} --to {other}"
        assert command in card.partition("## Convert it")[2]
    assert str(path.parent) not in card
    assert str(text.parent) not in card
    listed = dict(line.split("  ")[::-1] for line in (path / DIGESTS).read_text().splitlines())
    assert listed["README.md"] == hashlib.sha256(card.encode()).hexdigest()


def test_the_same_run_writes_the_same_card(quantize, text):
    flags = ["--quant_scheme", "int8", "--num_calib_data", "4"]
    first, _ = quantize(*flags)
    second, _ = quantize(*flags)
    assert (first / "README.md").read_bytes() == (second / "README.md").read_bytes()
    other, _ = quantize("--quant_scheme", "int8", "--num_calib_data", "3")
    assert rows(other)["digest of the data"] != rows(first)["digest of the data"]


def test_the_scheme_of_a_recipe(quantize):
    path, _ = quantize("--recipe", "W8")
    assert rows(path)["scheme"] == "int8_wo (recipe w8)"
    assert metadata_load(path / "README.md")["tags"] == ["quark", "quantized", "w8"]


def test_groups_of_several_sizes(quantize):
    """The flags say 32; two of seven kinds of layers have groups of 16."""
    smaller = [
        *("--group_size_per_layer", "*q_proj", 16),
        *("--group_size_per_layer", "*v_proj", 16),
    ]
    path, _ = quantize("--quant_scheme", "W4A16", "--group_size", 32, *smaller)
    words = "int4 per group 32 sym (10 layers), int4 per group 16 sym (4 layers)"
    assert rows(path)["weights"] == words


def test_conversions_are_those_that_hold_the_layers(quantize):
    """GGUF has no inputs of 8 bits for each token; fake quantization is no packed checkpoint."""
    path, _ = quantize("--quant_scheme", "ptpc_int8")
    assert "--to onnx" in (path / "README.md").read_text("utf-8")
    assert "--to gguf" not in (path / "README.md").read_text("utf-8")
    path, _ = quantize("--quant_scheme", "int4_wo_32", "--export_weight_format", "fake_quantized")
    assert "## Convert it" not in (path / "README.md").read_text("utf-8")


def test_from_files_to_files(quantize):
    path, printed = quantize("--quant_scheme", "int8_wo")
    assert "file2file" in printed
    assert rows(path)["calibration"] == "none needed"
    assert "perplexity" not in rows(path)


def test_of_several_formats(quantize):
    pytest.importorskip("gguf")
    path, _ = quantize(
        "--quant_scheme",
        "int4_wo_32",
        *("--model_export", "hf_format"),
        *("--model_export", "gguf"),
    )
    assert rows(path)["weights"] == "int4 per group 32 sym"
    assert "README.md" in (path / DIGESTS).read_text()


LICENSED = "---\nlicense: other\nlicense_name: mine\nlicense_link: 7\nlanguage: en\n---\n# Model\n"


@pytest.mark.parametrize(
    ("original", "kept"),
    [
        (LICENSED, {"license": "other", "license_name": "mine"}),
        ("no card", {}),
        ("---\nlicense: [mit\n---\n", {}),
        ("---\n- mit\n---\n", {}),
        ("---\nlicense: !!python/object/apply:os.abort []\n---\n", {}),
        (b"\xff\xfe---", {}),
    ],
    ids=["card", "text", "damaged", "list", "code", "bytes"],
)
def test_licence_of_the_original(original, kept, quantize, model_dir, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(model_dir, source)
    content = original if isinstance(original, bytes) else original.encode()
    (source / "README.md").write_bytes(content)
    path, _ = quantize("--quant_scheme", "int8_wo", model=source)
    metadata = metadata_load(path / "README.md")
    assert {k: v for k, v in metadata.items() if k.startswith("license")} == kept


def test_original_name(tmp_path):
    cached = tmp_path / "models--org--a-model" / "snapshots" / "0a1b"
    cached.mkdir(parents=True)
    (tmp_path / "b.gguf").touch()
    assert original_name(cached) == "org/a-model"
    assert original_name(tmp_path / "b.gguf") == "b"
    assert original_name(tmp_path) == tmp_path.name


def test_places_are_left_out_of_mixtures(text):
    assert place_name(f"pileval:0.7,{text}:0.3") == f"pileval:0.7,{text.name}:0.3"
    assert place_name(str(text)) == text.name
    assert place_name("a/b:c") == "a/b:c"
