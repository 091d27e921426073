"""``quark quantize`` of models that read images and audio."""

import json

import pytest
import torch

from quark.demo.text import model_directory
from quark.torch.export.recognition import load_checkpoint, read_contents
from quark.torch.quantization.config.template import LLMTemplate
from tests.models import vision_language
from tests.models.architectures import small_config
from tests.unit.evaluation.test_media import write_wave


@pytest.fixture
def llava_dir(tmp_path):
    """A vision-language model with a tokenizer and a file of its processor."""
    from transformers import CONFIG_MAPPING, AutoTokenizer, LlavaForConditionalGeneration

    kind, fields = vision_language.CASES["llava"].config
    text = {**fields["text_config"], "vocab_size": 2048}
    path = tmp_path / "llava"
    LlavaForConditionalGeneration(
        CONFIG_MAPPING[kind](**{**fields, "text_config": text, "image_token_index": 2047})
    ).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"image_processor_type": "X"}')
    return path


def quantized(path):
    """The names of the quantized layers of a checkpoint."""
    return {layer.name for layer in read_contents(path).summary.layers}


def test_the_plan_names_what_stays_in_float(quark, llava_dir, tmp_path):
    out = tmp_path / "out"
    flags = ["--quant_scheme", "int8_wo", "--skip_evaluation", "--output_dir", out]
    done = quark("quantize", "--model_dir", llava_dir, *flags)
    assert done.exit_code == 0, done.output
    assert "the output head; vision tower (model.vision_tower); projector" in done.output
    assert all("language_model" in name for name in quantized(out))
    assert 'transformers.LlavaForConditionalGeneration.from_pretrained("' in done.output
    assert type(load_checkpoint(out)).__name__ == "LlavaForConditionalGeneration"
    assert (out / "preprocessor_config.json").read_text() == '{"image_processor_type": "X"}'
    assert (out / "tokenizer.json").is_file()


@pytest.mark.parametrize("everything", [True, False])
def test_a_config_file_decides_everything(quark, llava_dir, everything, tmp_path):
    """The keys of config.json alone have no float_parts: towers are quantized, and named."""
    config = LLMTemplate.get("llava").get_config("int8_wo")
    file, out = tmp_path / "config.json", tmp_path / "out"
    file.write_text(json.dumps(config.to_dict(everything=everything)))
    flags = ["--output_dir", out, "--config", file, "--skip_evaluation"]
    done = quark("quantize", "--model_dir", llava_dir, *flags)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert ("quantized too vision tower (model.vision_tower)" in said) is not everything
    assert ("in float the output head" in said) or ("in float lm_head" in said)
    assert any("vision_tower" in name for name in quantized(out)) is not everything


def test_included_parts(quark, llava_dir, tmp_path):
    out = tmp_path / "out"
    flags = ["--quant_scheme", "int8_wo", "--skip_evaluation", "--output_dir", out]
    done = quark("quantize", "--model_dir", llava_dir, *flags, "--include_parts", "tower")
    assert done.exit_code == 0, done.output
    assert "vision tower" not in done.output
    assert any("vision_tower" in name for name in quantized(out))
    assert not any("projector" in name for name in quantized(out))
    flags.append("--overwrite")
    done = quark("quantize", "--model_dir", llava_dir, *flags, "--include_parts", "towers")
    assert done.exit_code == 2
    assert "--include_parts: 'towers' is unknown. Did you mean 'tower'?" in done.output


def test_included_parts_and_an_explicit_list(quark, llava_dir):
    flags = ["--quant_scheme", "int8_wo", "--include_parts", "tower", "--exclude_layers", "lm_head"]
    done = quark("quantize", "--model_dir", llava_dir, *flags)
    assert done.exit_code == 2
    assert "--include_parts: --exclude_layers names all layers that stay in float" in done.output


def test_text_alone_for_a_static_scheme(quark, llava_dir, tmp_path, text):
    out = tmp_path / "out"
    flags = ["--quant_scheme", "fp8", "--output_dir", out, "--include_parts", "tower", "projector"]
    data = ["--dataset", text, "--eval_data", text, "--seq_len", 32, "--num_eval_data", 2]
    done = quark("quantize", "--model_dir", llava_dir, *flags, *data)
    assert done.exit_code == 0, done.output
    assert all("language_model" in name for name in quantized(out))
    assert "perplexity" in done.output


def test_a_model_of_audio(quark, tmp_path):
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    source, out, sounds = tmp_path / "whisper", tmp_path / "out", tmp_path / "sounds"
    config = small_config("whisper", max_source_positions=8, decoder_start_token_id=1)
    model = WhisperForConditionalGeneration(config)
    model.generation_config.update(eos_token_id=2, pad_token_id=0, decoder_start_token_id=1)
    model.save_pretrained(source)
    extractor = WhisperFeatureExtractor(chunk_length=1, n_fft=400, hop_length=1000)
    extractor.save_pretrained(source)
    sounds.mkdir()
    write_wave(sounds / "a.wav", [0.1 * (k % 7) for k in range(800)])
    flags = ["--model_dir", source, "--output_dir", out, "--quant_scheme", "fp8"]
    done = quark("quantize", *flags, "--dataset", sounds)
    assert done.exit_code == 0, done.output
    assert "up to 128 sounds" in done.output
    assert "WhisperForConditionalGeneration does not predict the next token" in done.output
    loaded = load_checkpoint(out)
    inputs = {"input_features": torch.zeros(1, 80, 16), "decoder_input_ids": torch.tensor([[1]])}
    assert type(loaded) is WhisperForConditionalGeneration
    assert loaded(**inputs).logits.isfinite().all()
    assert json.loads((out / "preprocessor_config.json").read_text())["chunk_length"] == 1
    done = quark("quantize", *flags, "--overwrite")
    assert done.exit_code == 2
    assert "--dataset: WhisperForConditionalGeneration reads input_features" in done.output
    done = quark("quantize", *flags, "--overwrite", "--dataset", sounds, "--tasks", "x")
    assert done.exit_code == 2
    assert "--tasks: WhisperForConditionalGeneration does not predict" in done.output


@pytest.mark.parametrize("name", ["HubertModel", "Wav2Vec2ForSequenceClassification"])
def test_a_model_of_audio_whose_type_has_a_tokenizer(quark, tmp_path, name):
    """Classes of such tokenizers and processors raise TypeError where there is no vocabulary."""
    import transformers

    source, out, sounds = tmp_path / "model", tmp_path / "out", tmp_path / "sounds"
    kind = getattr(transformers, name)
    sizes = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
    sizes |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    sizes |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = kind.config_class(**sizes, intermediate_size=32, num_feat_extract_layers=2)
    torch.manual_seed(0)
    kind(config).save_pretrained(source)
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=4000).save_pretrained(source)
    sounds.mkdir()
    write_wave(sounds / "a.wav", [0.1 * (k % 7) for k in range(800)])
    flags = ["--model_dir", source, "--output_dir", out, "--quant_scheme", "fp8"]
    done = quark("quantize", *flags, "--dataset", sounds)
    assert done.exit_code == 0, done.output
    assert quantized(out)
    assert load_checkpoint(out)(torch.zeros(1, 800))[0].isfinite().all()
    assert json.loads((out / "preprocessor_config.json").read_text())["sampling_rate"] == 4000
    (source / "preprocessor_config.json").unlink()
    done = quark("quantize", *flags, "--overwrite", "--dataset", sounds)
    assert done.exit_code == 2
    assert "model has no processor that can be loaded" in done.output


def test_a_model_of_images(quark, tmp_path):
    image = pytest.importorskip("PIL.Image")
    from transformers import ViTForImageClassification, ViTImageProcessor

    source, out, images = tmp_path / "vit", tmp_path / "out", tmp_path / "images"
    config = small_config("vit", image_size=16, patch_size=8)
    ViTForImageClassification(config).save_pretrained(source)
    images.mkdir()
    image.effect_noise((20, 16), 60).save(images / "a.png")
    flags = ["--model_dir", source, "--output_dir", out, "--quant_scheme", "fp8"]
    done = quark("quantize", *flags, "--dataset", images)
    assert done.exit_code == 2
    assert "has no processor that can be loaded" in done.output
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(source)
    done = quark("quantize", *flags, "--dataset", images)
    assert done.exit_code == 0, done.output
    assert "classifier" not in quantized(out)
    (images / "b.png").write_bytes(b"no image")
    done = quark("quantize", *flags, "--overwrite", "--dataset", images)
    assert done.exit_code == 2
    assert "b.png is no image that can be read" in done.output


def test_verbs_that_read_text_alone(quark, model_dir, tmp_path):
    write_wave(tmp_path / "a.wav", [0.1] * 8)
    done = quark("collect", "--model_dir", model_dir, "--output_dir", "x", "--dataset", tmp_path)
    assert done.exit_code == 2
    assert "holds audio, not text: 'quark quantize' calibrates with it" in done.output
