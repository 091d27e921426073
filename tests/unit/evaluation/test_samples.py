"""Samples of images, audio and messages become batches by the processor of a model."""

import json

import pytest
import torch

from quark.demo.text import model_directory
from quark.torch.evaluation.samples import (
    complete_batches,
    kind_of_source,
    make_batches,
    read_samples,
)
from tests.models.architectures import small_config
from tests.unit.evaluation.test_media import write_wave

TEMPLATE = (
    "{% for m in messages %}{{m.role}}: {% if m.content is string %}{{m.content}}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{p.text}}{% else %}<{{p.type}}>{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
)


@pytest.fixture
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_directory())


@pytest.fixture
def sounds(tmp_path):
    """A directory of two sounds."""
    for index in range(2):
        (tmp_path / f"s{index}").mkdir()
        values = [0.1 * (k % (5 + index)) for k in range(800)]
        write_wave(tmp_path / f"s{index}/a.wav", values)
    return tmp_path


def write_lines(path, *records):
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n", encoding="utf-8")
    return path


USER = {"role": "user", "content": "What is it?"}


def test_kinds_of_sources(sounds, tmp_path):
    assert kind_of_source(sounds) == "audio"
    assert kind_of_source(write_lines(tmp_path / "a.jsonl", {"messages": [USER]})) == "messages"
    assert kind_of_source(write_lines(tmp_path / "b.jsonl", [USER])) == "messages"
    assert kind_of_source(write_lines(tmp_path / "c.jsonl", {"text": "words"})) is None
    assert kind_of_source(tmp_path / "none") is None
    (tmp_path / "x.png").write_bytes(b"")
    with pytest.raises(ValueError, match="images and audio: give a directory of one kind"):
        kind_of_source(tmp_path)


def test_parts_of_messages(tmp_path):
    parts = [
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "b.png"}},
        {"type": "audio", "path": "c.wav"},
        {"type": "text", "text": "What?"},
    ]
    path = write_lines(tmp_path / "a.jsonl", [{"role": "user", "content": parts}], [USER])
    first, second = read_samples(path)
    assert first.images == [tmp_path / "a.png", tmp_path / "b.png"]
    assert first.sounds == [tmp_path / "c.wav"]
    kinds = [part["type"] for part in first.messages[0]["content"]]
    assert kinds == ["image", "image", "audio", "text"]
    assert second == ([USER], [], [])
    assert len(read_samples(path, 1)) == 1


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([{"role": "user"}], "line 1: expected messages with a role and content"),
        ([3], "line 1: expected messages"),
        ([{"role": "user", "content": [{"type": "video"}]}], "type text, image or audio"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "https://a/b.png"}]}],
            "expected the file of an image on this machine, got 'https://a/b.png'",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], "file of an image .*got 'None'"),
    ],
)
def test_wrong_messages(record, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        read_samples(write_lines(tmp_path / "a.jsonl", record))


def test_damaged_lines(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [USER])
    path.write_text(path.read_text() + "{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl is no \.jsonl file"):
        read_samples(path)


def test_messages_of_text_models(tokenizer, tmp_path):
    samples = read_samples(write_lines(tmp_path / "a.jsonl", [USER]))
    with pytest.raises(ValueError, match="has no chat template, which messages need"):
        make_batches(samples, tokenizer)
    tokenizer.chat_template = TEMPLATE
    [batch] = make_batches(samples, tokenizer)
    assert tokenizer.decode(batch["input_ids"][0]).endswith("user: What is it?;")
    [cut] = make_batches(samples, tokenizer, length=3)
    assert cut["input_ids"].shape == (1, 3)


def test_sounds_for_an_encoder_decoder(sounds):
    """The extractor gets sounds at its own rate; the decoder reads what the model generates."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    extractor = WhisperFeatureExtractor(chunk_length=1, n_fft=400, hop_length=1000)
    batches = make_batches(read_samples(sounds), extractor)
    assert [tuple(batch["input_features"].shape) for batch in batches] == [(1, 80, 16)] * 2
    assert not torch.equal(*(batch["input_features"] for batch in batches))
    config = small_config("whisper", max_source_positions=8, decoder_start_token_id=1)
    model = WhisperForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()
    settings = {"eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    model.generation_config.update(**settings)
    for batch in complete_batches(model, batches):
        assert batch["input_features"].dtype is torch.bfloat16
        assert batch["decoder_input_ids"][0, 0] == 1
        model(**batch)


def test_texts_for_an_encoder_decoder(build, batches):
    from transformers import T5ForConditionalGeneration

    model = T5ForConditionalGeneration(small_config("t5"))
    completed = complete_batches(model, batches)
    assert all(torch.equal(b["decoder_input_ids"], b["input_ids"]) for b in completed)
    assert model(**completed[0]).logits.shape == (*batches[0].shape, 64)
    labels = {"input_ids": batches[0], "labels": batches[0]}
    assert complete_batches(model, [labels])[0].keys() == labels.keys()
    assert complete_batches(build(), batches) == batches  # a decoder


def test_processors_of_another_modality(sounds, tokenizer):
    with pytest.raises(ValueError, match=r"takes no audio, such as .*a\.wav"):
        make_batches(read_samples(sounds), tokenizer)


@pytest.fixture
def images(tmp_path):
    """A directory of two images of different sizes."""
    image = pytest.importorskip("PIL.Image")
    for index in range(2):
        image.effect_noise((20 + index, 16), 60).save(tmp_path / f"{index}.png")
    return tmp_path


def test_images_for_an_image_processor(images, tokenizer):
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    batches = make_batches(read_samples(images), processor)
    assert [tuple(batch["pixel_values"].shape) for batch in batches] == [(1, 3, 16, 16)] * 2
    assert all(batch.keys() == {"pixel_values"} for batch in batches)
    with pytest.raises(ValueError, match=r"takes no images, such as .*0\.png"):
        make_batches(read_samples(images), tokenizer)


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "no template"])
def test_images_for_a_model_of_images_and_text(images, tokenizer, template):
    from transformers import CLIPImageProcessor, LlavaProcessor

    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": 16, "width": 16}
    processor = LlavaProcessor(
        CLIPImageProcessor(size=size, crop_size=size),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    batch = make_batches(read_samples(images), processor)[0]
    image = tokenizer.convert_tokens_to_ids("<image>")
    assert int((batch["input_ids"] == image).sum()) == 4  # patches of 8 x 8
    assert "Describe the image." in tokenizer.decode(batch["input_ids"][0])
    assert batch["pixel_values"].shape == (1, 3, 16, 16)
