"""Parts of models that stay in float are found by structure, without names."""

import pytest
import torch
from torch import nn

from quark.torch import LLMTemplate
from quark.torch.quantization.config.builder import build_config
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.match import assign
from quark.torch.quantization.config.part_kinds import PARTS
from quark.torch.quantization.config.parts import find_parts, output_layers
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.resolution import output_head, resolve_names
from quark.torch.quantization.nn.experts import split_experts
from tests.models.architectures import from_config, small_config
from tests.models.vision_language import CASES, outline

# Model -> kind and name of each of its parts.
MULTIMODAL = {
    "qwen2_5_vl": [("tower", "model.visual")],
    "qwen3_vl": [("tower", "model.visual")],
    "llava": [("tower", "model.vision_tower"), ("projector", "model.multi_modal_projector")],
    "gemma3": [("tower", "model.vision_tower")],
    "mllama": [("tower", "model.vision_model"), ("projector", "model.multi_modal_projector")],
    "llama4": [("tower", "vision_model"), ("projector", "multi_modal_projector")],
}


def empty(name, auto=None):
    """A model on the meta device, of an Auto class or the one for causal language models."""
    import transformers

    with torch.device("meta"):
        if auto is None:
            return from_config(small_config(name))
        return getattr(transformers, auto).from_config(small_config(name))


@pytest.mark.parametrize("name", CASES)
def test_towers_and_projectors(name):
    parts = find_parts(outline(name))
    assert [part[:2] for part in parts] == MULTIMODAL[name]
    assert parts[0].title == "vision tower"


def test_the_tower_of_audio():
    tower, projector = find_parts(empty("qwen2_audio", "AutoModelForMultimodalLM"))
    assert tower == ("tower", "model.audio_tower", "audio tower")
    assert projector[:2] == ("projector", "model.multi_modal_projector")


def test_projectors_inside_of_the_language_model():
    names = {part.name for part in find_parts(empty("phi4_multimodal")) if part.kind == "projector"}
    assert "model.embed_tokens_extend.image_embed.img_projection_up" in names
    assert all(name.startswith("model.embed_tokens_extend.") for name in names)


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("llama", None),
        ("blt", None),
        ("mixtral", None),  # its routers are no layers that are quantized
        ("bart", "AutoModelForSeq2SeqLM"),
        ("whisper", "AutoModelForSpeechSeq2Seq"),
        ("clip", "AutoModel"),
        ("vit", "AutoModelForImageClassification"),
        ("bert", "AutoModelForSequenceClassification"),
    ],
)
def test_models_of_one_piece(name, auto):
    assert find_parts(empty(name, auto)) == []


class Wrapper(nn.Module):
    """A module around a model, with its configuration and nothing else."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.config = model, model.config


def test_a_model_in_a_wrapper():
    parts = find_parts(Wrapper(outline("llava")))
    assert [part.name for part in parts] == [
        "inner.model.vision_tower",
        "inner.model.multi_modal_projector",
    ]
    assert find_parts(Wrapper(empty("llama"))) == []
    assert output_head(Wrapper(empty("llama"))) == ["inner.lm_head"]


@pytest.mark.parametrize("is_split", [False, True], ids=["stacked", "split"])
@pytest.mark.parametrize(
    ("name", "router"),
    [
        ("qwen2_moe", "model.layers.0.mlp.shared_expert_gate"),
        ("afmoe", "model.layers.1.mlp.router.gate"),
        ("jetmoe", "model.layers.0.mlp.router.layer"),
    ],
)
def test_routers(name, router, is_split):
    model = empty(name)
    if is_split:
        split_experts(model)
    parts = find_parts(model)
    assert {part.kind for part in parts} == {"router"}
    assert router in [part.name for part in parts]


class Mixture(nn.Module):
    """Experts as a list, and a router of another name."""

    def __init__(self, width):
        super().__init__()
        self.choose, self.after = nn.Linear(8, 3), nn.Linear(8, width)
        self.many = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))


def test_experts_in_a_list():
    model = nn.Sequential(Mixture(16))
    assert [part.name for part in find_parts(model)] == ["0.choose"]
    assert find_parts(nn.Sequential(*(nn.Linear(8, 3) for _ in range(3)))) == []


OUT, ELECTRA = "classifier.out_proj", "discriminator_predictions"
BOXES, RANGE = ("class_labels_classifier", "bbox_predictor"), range(3)


@pytest.mark.parametrize(
    ("name", "auto", "head"),
    [
        ("bert", "AutoModelForSequenceClassification", ["classifier"]),
        ("llama", "AutoModelForSequenceClassification", ["score"]),
        ("vit", "AutoModelForImageClassification", ["classifier"]),
        ("whisper", "AutoModelForSpeechSeq2Seq", ["proj_out"]),
        ("clip", "AutoModel", []),
        ("roberta", "AutoModelForSequenceClassification", ["classifier.dense", OUT]),
        ("deberta-v2", "AutoModelForSequenceClassification", ["pooler.dense", "classifier"]),
        ("electra", "AutoModelForPreTraining", [f"{ELECTRA}.dense", f"{ELECTRA}.dense_prediction"]),
        ("vilt", "AutoModelForVisualQuestionAnswering", ["classifier.0", "classifier.3"]),
        ("yolos", "AutoModelForObjectDetection", [f"{n}.layers.{i}" for n in BOXES for i in RANGE]),
        ("resnet", "AutoModelForImageClassification", ["classifier.1"]),
        ("dinov3_vit", "AutoModel", []),  # its patches are embedded before its base model
    ],
)
def test_output_heads(name, auto, head):
    assert output_head(empty(name, auto)) == head


def test_a_head_of_convolutions():
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    with torch.device("meta"):
        model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=3))
    stages = [f"decode_head.linear_projections.{n}.proj" for n in range(4)]
    assert output_head(model) == [*stages, "decode_head.linear_fuse", "decode_head.classifier"]


def test_a_head_of_several_layers_stays_in_float():
    model = empty("roberta", "AutoModelForSequenceClassification")
    config = LLMTemplate("own", exclude_layers_name=["lm_head"]).get_config("int8")
    config = resolve_names(config, model)
    names = {n: type(m) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert [name for name in names if name not in assign(names, config)] == [
        "classifier.dense",
        "classifier.out_proj",
    ]


def test_the_head_of_a_model_inside():
    model = outline("llama4")
    model.get_output_embeddings = lambda: None
    assert output_layers(model) == [model.language_model.lm_head]


def quantized(model, config):
    """Names of the layers that a configuration quantizes."""
    kinds = {name: type(m) for name, m in model.named_modules() if type(m) is nn.Linear}
    return set(assign(kinds, resolve_names(config, model)))


def test_what_a_template_leaves_out():
    model, template = outline("llava"), LLMTemplate.get("llava")
    names = quantized(model, template.get_config("int8_wo"))
    assert names
    assert all(name.startswith("model.language_model.layers.") for name in names)
    more = quantized(model, template.get_config("int8_wo", float_parts=["tower"])) - names
    assert more == {f"model.multi_modal_projector.linear_{n}" for n in (1, 2)}
    every = quantized(model, template.get_config("int8_wo", float_parts=[]))
    assert {name.split(".")[1] for name in every - names - more} == {"vision_tower"}
    assert "lm_head" not in every


def test_an_explicit_list_is_the_whole_list():
    model, template = outline("llava"), LLMTemplate.get("llava")
    config = template.get_config("int8_wo", exclude_layers=["*.fc1"])
    assert config.float_parts == []
    linear = {name for name, m in model.named_modules() if type(m) is nn.Linear}
    assert quantized(model, config) == {name for name in linear if not name.endswith(".fc1")}
    own = LLMTemplate("own", exclude_layers_name=["lm_head"])
    assert own.get_config("int8_wo").float_parts == []
    assert build_config(scheme("int8_wo")).float_parts == list(PARTS)


def test_decoders_are_resolved_as_before():
    model = empty("llama")
    config = resolve_names(LLMTemplate.get("llama").get_config("int8"), model)
    assert config.exclude == ["lm_head"]
    assert config.float_parts == []
    assert config == resolve_names(Config(scheme("int8"), exclude=["lm_head"]), model)


def test_towers_make_no_cache():
    model = outline("llava")
    config = LLMTemplate.get("llava").get_config("fp8", kv_cache_scheme="fp8")
    names = set(resolve_names(config, model).kv_cache_quant_config)
    kinds = ("k_proj", "v_proj")
    assert names == {
        f"model.language_model.layers.{n}.self_attn.{kind}" for n in (0, 1) for kind in kinds
    }
    assert not any("vision" in name for name in quantized(model, config))


def test_unknown_kinds():
    with pytest.raises(ValueError, match=r"float_parts: 'towers' is unknown.*'tower'"):
        Config(float_parts=["towers"])
    with pytest.raises(ValueError, match=r"float_parts\[0\]: expected a text, got 3"):
        Config.from_dict({"float_parts": [3]})
