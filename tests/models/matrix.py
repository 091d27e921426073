"""Tiny random models of all kinds that users quantize, and what becomes of each in each way.

``FAMILIES`` is the table: family -> cases. A case is a name, a function that makes the model, and
one that makes the arguments of a call. ``outcome`` quantizes, exports and imports one of them;
``python -m tests.models.matrix`` prints the outcomes of all as Markdown.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch import ModelImporter, ModelQuantizer, export_safetensors
from quark.torch.export.recognition import load_checkpoint
from quark.torch.quantization.config.algo import AWQConfig, GPTQConfig
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.packed import PackedLayer
from tests.models import vision_language

_INT16 = QuantizationConfig(
    weight=QuantizationSpec(
        "int16", qscheme="per_channel", ch_axis=0, symmetric=True, is_dynamic=False
    ),
    input_tensors=QuantizationSpec("int16", qscheme="per_tensor", symmetric=True, is_dynamic=True),
)
# Way -> scheme, algorithms.
WAYS: dict[str, tuple[str, list[Any]]] = {
    "fp8": ("fp8", []),
    "int8": ("int8", []),
    "int4_wo_32": ("int4_wo_32", []),
    "gptq": ("int4_wo_32", [GPTQConfig()]),
    "awq": ("int4_wo_32", [AWQConfig()]),
}
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    "max_position_embeddings": 64,
}
_IMAGE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_STAGES = {"num_labels": 5, "hidden_sizes": [32, 64], "depths": [2, 2]}


def _ids(shape: tuple[int, int], seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def text() -> dict[str, torch.Tensor]:
    """Sequences, one of which is padded."""
    ids, mask = _ids((3, 14)), torch.ones(3, 14, dtype=torch.long)
    ids[1, 9:], mask[1, 9:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def pairs() -> dict[str, torch.Tensor]:
    """Sequences for an encoder and others, of another length, for a decoder."""
    return text() | {"decoder_input_ids": _ids((3, 11), 3)}


def speech() -> dict[str, torch.Tensor]:
    """Spectrograms for an encoder and sequences for a decoder."""
    return {"input_features": _floats(3, 16, 48), "decoder_input_ids": _ids((3, 11))}


def images() -> dict[str, torch.Tensor]:
    """Images."""
    return {"pixel_values": _floats(3, 3, 32, 32)}


def captions() -> dict[str, torch.Tensor]:
    """Images with texts."""
    ids = _ids((3, 14))
    ids[:, -1] = 2
    return images() | {"input_ids": ids}


@dataclass(frozen=True)
class Case:
    """A tiny model.

    Attributes:
        name: Name for the table.
        cls: Class of Transformers; its name.
        options: Options of its configuration.
        batch: Makes the arguments of a call.
        ungrouped: Layers that stay in float where weights are in groups, which do not divide them.
        lacks: Way -> part of the error that says why the model cannot go it.
    """

    name: str
    cls: str
    options: dict[str, Any]
    batch: Callable[[], dict[str, torch.Tensor]] = text
    ungrouped: tuple[str, ...] = ()
    lacks: dict[str, str] = field(default_factory=dict)

    def config(self) -> Any:
        """Return the configuration of the model."""
        import transformers

        kind = getattr(transformers, self.cls)
        return kind.config_class(**self.options)

    def empty(self) -> nn.Module:
        """Return the model as its constructor leaves it."""
        import transformers

        model: nn.Module = getattr(transformers, self.cls)(self.config()).eval()
        return model

    def build(self) -> nn.Module:
        """Return the model, random in all its parameters, the same each time."""
        torch.manual_seed(0)
        model = self.empty()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                is_gain = name.endswith("weight")
                nn.init.normal_(parameter.detach(), mean=0.5 * is_gain, std=0.2)
            else:
                nn.init.normal_(parameter.detach(), std=0.15)
        return model


_SMALL_T5 = {
    **{"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2},
}
_TEXT_TOWER = {**_TEXT, "projection_dim": 64}
_CLIP = {"text_config": _TEXT_TOWER, "vision_config": _IMAGE, "projection_dim": 64}
# All convolutions stay in float.
_CLASSIFIER = {"gptq": "no linear layer", "awq": "found nothing to rescale"}
_SWIN = {
    **{"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]},
    **{"window_size": 4, "num_labels": 5},
}
_SPEECH = {
    **_SEQ2SEQ,
    **{"num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 64},
}

FAMILIES: dict[str, list[Case]] = {
    "encoder-decoder": [
        Case("BART", "BartForConditionalGeneration", _SEQ2SEQ, pairs),
        Case("T5", "T5ForConditionalGeneration", _SMALL_T5, pairs),
        Case("Whisper", "WhisperForConditionalGeneration", _SPEECH, speech),
        Case("mBART", "MBartForConditionalGeneration", _SEQ2SEQ, pairs),
    ],
    "decoder": [Case("Falcon", "FalconForCausalLM", _TEXT | {"bias": True})],
    "encoder": [
        Case("BERT", "BertForMaskedLM", _TEXT),
        Case("ModernBERT", "ModernBertForMaskedLM", _TEXT | {"cls_token_id": 1, "sep_token_id": 2}),
        Case("embedding model", "XLMRobertaModel", _TEXT),
        Case("classifier", "BertForSequenceClassification", _TEXT | {"num_labels": 5}),
    ],
    "vision": [
        Case("ViT", "ViTForImageClassification", _IMAGE | {"num_labels": 5}, images),
        Case("Swin", "SwinForImageClassification", _SWIN, images, ("*patch_embeddings*",)),
        Case(
            "Swin V2",
            "Swinv2ForImageClassification",
            _SWIN,
            images,
            ("*patch_embeddings*", "*position_bias*"),
        ),
        Case(
            "ConvNeXt",
            "ConvNextForImageClassification",
            _STAGES | {"num_stages": 2},
            images,
            ("*patch_embeddings*", "*dwconv*"),
        ),
        Case(
            "ResNet",
            "ResNetForImageClassification",
            _STAGES | {"embedding_size": 32, "layer_type": "basic"},
            images,
            ("*embedder.convolution",),
        ),
        Case("CLIP", "CLIPModel", _CLIP, captions),
        Case("SigLIP", "SiglipModel", _CLIP, captions),
        Case("DINOv2", "Dinov2ForImageClassification", _IMAGE | {"num_labels": 5}, images),
        Case(
            "EfficientNet",
            "EfficientNetForImageClassification",
            {"num_labels": 5, "image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3}
            | {"hidden_dim": 320},
            images,
            ("*embeddings.convolution", "*conv*", "*squeeze_excite*"),
            _CLASSIFIER,
        ),
    ],
}


FAMILIES["vision-language"] = [
    Case(
        vision_language.TITLES[name],
        case.model,
        case.config[1],
        partial(vision_language.images, name),
    )
    for name, case in vision_language.CASES.items()
]


def outputs(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of a model, or what it returns first, flat."""
    with torch.no_grad():
        result = model(**batch)
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if getattr(result, name, None) is not None:
            return getattr(result, name).flatten()  # type: ignore[no-any-return]
    raise TypeError(f"{type(result).__name__} has no logits")


def quantized(case: Case, way: str, model: nn.Module | None = None) -> nn.Module:
    """Return the model of a case, quantized one way and frozen."""
    name, algorithms = WAYS[way]
    config = Config(
        global_quant_config=scheme(name, 32),
        exclude=list(case.ungrouped) if name.startswith("int4") else [],
        algo_config=algorithms or None,
    )
    model = case.build() if model is None else model
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, [case.batch()]))


def outcome(case: Case, way: str) -> str:
    """Quantize, export and import a model one way, and return how that went, in a word or two.

    Returns:
        "✓" if both loaders give the logits of the quantized model bit for bit, in the type of its
        values; "–" if the way does not apply to the model, which is refused with the reason; else
        what went wrong.
    """
    import transformers

    try:
        model = quantized(case, way)
    except ValueError as error:
        reason = case.lacks.get(way)
        return "–" if reason is not None and reason in str(error) else f"quantize: {error}"
    batch = case.batch()
    expected = outputs(model, batch)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "export"
        export_safetensors(model, path)
        loaders: dict[str, Callable[[], nn.Module]] = {
            "load_checkpoint": lambda: load_checkpoint(path),
            "ModelImporter": lambda: ModelImporter(str(path), "safetensors").import_model_info(
                case.empty()
            ),
            "from_pretrained": lambda: getattr(transformers, case.cls).from_pretrained(path).eval(),
        }
        for name, load in loaders.items():
            loaded = load()
            if type(loaded).__name__ != case.cls:
                return f"{name}: {type(loaded).__name__}"
            if not any(isinstance(m, PackedLayer) for m in loaded.modules()):
                return f"{name}: nothing is packed"
            if {p.dtype for p in loaded.parameters()} != {torch.float32}:
                return f"{name}: types"
            if not torch.equal(outputs(loaded, batch), expected):
                return f"{name}: other logits"
    return "✓"


def function_change(case: Case, algorithm: Any) -> float:
    """Return the relative change of the logits by an algorithm, with all in int16."""
    model, batch = case.build(), case.batch()
    before = outputs(model, batch)
    config = Config(global_quant_config=_INT16, algo_config=[algorithm])
    ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, [batch]))
    after = outputs(model, batch)
    return float((after - before).norm() / before.norm())


def table(families: dict[str, list[Case]]) -> str:
    """Return the outcomes of all cases as a table in Markdown."""
    rows = [["family", "model", *WAYS], ["---"] * (2 + len(WAYS))]
    for family, cases in families.items():
        rows += [[family, case.name, *(outcome(case, way) for way in WAYS)] for case in cases]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    chosen = {k: v for k, v in FAMILIES.items() if not sys.argv[1:] or k in sys.argv[1:]}
    print(table(chosen))
