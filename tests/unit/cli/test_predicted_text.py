"""Models that predict no next token: each verb works, or says what to type."""

import json

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from quark.demo.text import model_directory
from quark.torch import load_statistics

BERT = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
T5 = {"vocab_size": 2048, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
CLIP = {
    "text_config": BERT,
    "vision_config": BERT | {"image_size": 16, "patch_size": 8},
    "projection_dim": 16,
}
MODELS = {
    "masked": ("BertForMaskedLM", BERT),
    "classes": ("BertForSequenceClassification", BERT),
    "encoder-decoder": ("T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}),
    "both": ("CLIPModel", CLIP),
    "images": ("ViTForImageClassification", BERT | {"image_size": 16, "patch_size": 8}),
}
SEARCH = ["--formats", "int4_wo_32,int8_wo", "--target_bits", 6, "--output", "mixed.json"]
SHORT = ["--seq_len", 16, "--num_calib_data", 4]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small random models with a tokenizer, by kind."""
    root = tmp_path_factory.mktemp("kinds")
    for kind, (name, options) in MODELS.items():
        torch.manual_seed(0)
        cls = getattr(transformers, name)
        cls(cls.config_class(**options)).save_pretrained(root / kind)
        AutoTokenizer.from_pretrained(model_directory()).save_pretrained(root / kind)
    return root


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (["evaluate", "MODEL"], "'quark report' without --dataset measures"),
        (["compare", "MODEL", "OTHER"], "'quark report' without --dataset measures"),
        (["search", "--model_dir", "MODEL", *SEARCH], "'quark quantize' takes other data|Give "),
        (["sample", "--model_dir", "MODEL", "--output", "x.jsonl"], "does not predict the next"),
    ],
)
def test_perplexity_is_refused(kind, call, advice, quark, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL").symlink_to(models / kind)
    (tmp_path / "OTHER").symlink_to(models / kind)
    result = quark(*call)
    assert result.exit_code == 2, result.output
    assert MODELS[kind][0] in result.stderr
    assert any(part in result.stderr for part in advice.split("|"))


@pytest.mark.parametrize("kind", ["masked", "encoder-decoder", "classes"])
def test_statistics_and_search(kind, quark, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, data = ["--model_dir", models / kind], ["--statistics", "stats"]
    for call in (
        ["collect", *model, "--output_dir", "stats", *SHORT],
        ["search", *model, *data, *SEARCH, "--skip_evaluation"],
        ["quantize", *model, *data, "--output_dir", "out", "--quant_scheme", "int4_wo_32",
         "--quant_algo", "gptq"],
    ):  # fmt: skip
        result = quark(*call)
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "mixed.json").read_text("utf-8"))["layer_quant_config"]
    statistics = load_statistics("stats")
    losses = [*statistics.probes.values(), *statistics.fine_probes.values()]
    assert losses and all(probe.divergence >= 0 for probe in losses)


def test_no_perplexity_after_quantizing(quark, models, tmp_path):
    given = ["--model_dir", models / "masked", "--output_dir", tmp_path / "out"]
    result = quark("quantize", *given, "--quant_scheme", "int8_wo")
    assert result.exit_code == 0, result.output
    assert "none: BertForMaskedLM does not predict the next token" in result.stdout
    report = ["report", tmp_path / "out", "--original", models / "masked"]
    page = ["--output", tmp_path / "page.html"]
    assert quark(*report, *page).exit_code == 0
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 99, encoding="utf-8")
    result = quark(*report, *page, "--overwrite", "--dataset", text)
    assert (result.exit_code, "Leave --dataset out" in result.stderr) == (2, True)


def test_graphs_of_onnx(quark, models, tmp_path):
    """An encoder-decoder is traced with tokens for its decoder; images are not traced."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    flags = ["--output_dir", tmp_path / "out", "--quant_scheme", "int8_wo"]
    flags += ["--model_export", "onnx", "--verify"]
    refused = quark("quantize", "--model_dir", models / "images", *flags)
    assert refused.exit_code == 2, refused.output
    assert "ViTForImageClassification reads pixel_values. Write hf_format, or" in refused.stderr
    made = quark("quantize", "--model_dir", models / "encoder-decoder", *flags)
    assert made.exit_code == 0, made.output
    assert "verified" in made.stdout


def test_text_for_a_model_that_takes_images_too(quark, models, tmp_path):
    place = ["--model_dir", models / "both", "--output_dir", tmp_path / "out"]
    refused = quark("quantize", *place, "--quant_scheme", "int8", *SHORT)
    assert refused.exit_code == 1, refused.output
    assert "CLIPModel does not run on this data" in refused.stderr
    assert "it takes more arguments, such as pixel_values beside input_ids" in refused.stderr


@pytest.mark.parametrize("algorithm", ["cle", "rotation"])
def test_algorithms_without_data_ask_for_images(algorithm, quark, models, tmp_path):
    """They run the model once, and no tokens do."""
    given = ["--model_dir", models / "images", "--output_dir", tmp_path / "out"]
    result = quark("quantize", *given, "--quant_scheme", "int8_wo", "--quant_algo", algorithm)
    assert result.exit_code == 2, result.output
    assert "reads pixel_values, not text. Give a directory of images" in result.stderr


def test_codebooks_are_no_text(quark, models, tmp_path):
    """Rows of text would be codebooks of one sequence."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32}
    config = transformers.MusicgenDecoderConfig(vocab_size=2048, num_codebooks=2, **sizes)
    transformers.MusicgenForCausalLM(config).save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(models / "masked").save_pretrained(tmp_path / "m")
    given = ["quantize", "--model_dir", tmp_path / "m", "--output_dir", tmp_path / "out"]
    result = quark(*given, "--quant_scheme", "int8_wo", "--quant_algo", "gptq")
    assert result.exit_code == 2
    assert "reads several tokens at a position, not text" in result.stderr
    result = quark(*given, "--quant_scheme", "int8_wo")
    assert result.exit_code == 0, result.output
    assert "MusicgenForCausalLM does not predict the next token" in result.stdout
