"""Tiny random vision-language models, and batches of images and text for them."""

from typing import NamedTuple

import torch

IMAGE = 60  # token that stands for an image, or a part of one
TEXT = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_VIT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "model_type": "clip_vision_model",
}
_LLAMA = {
    **TEXT,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_QWEN = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


TITLES = {
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "llava": "Llava",
    "gemma3": "Gemma 3",
    "mllama": "Mllama",
    "llama4": "Llama 4",
}


class Case(NamedTuple):
    """A vision-language model: its class, its configuration, and how images come to it.

    Attributes:
        model: Name of the class.
        config: Type of the configuration, and its fields.
        tokens: Tokens that stand for an image.
        images: Arguments with images.
    """

    model: str
    config: tuple
    tokens: int
    images: dict


def _pixels(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


_GRID = {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}  # 16 patches, merged to 4 tokens
CASES = {
    "qwen2_5_vl": Case(
        "Qwen2_5_VLForConditionalGeneration",
        (
            "qwen2_5_vl",
            {
                "vision_config": {**_QWEN, "window_size": 32, "fullatt_block_indexes": [1]},
                "text_config": {**_LLAMA, "rope_parameters": _ROPE},
                "image_token_id": IMAGE,
                "vision_start_token_id": 61,
                "video_token_id": 62,
            },
        ),
        4,
        {"pixel_values": _pixels(32, 3 * 2 * 8 * 8), **_GRID},
    ),
    "qwen3_vl": Case(
        "Qwen3VLForConditionalGeneration",
        (
            "qwen3_vl",
            {
                "vision_config": {
                    **_QWEN,
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0],
                },
                "text_config": {**_LLAMA, "rope_parameters": _ROPE},
                "image_token_id": IMAGE,
                "vision_start_token_id": 61,
                "vision_end_token_id": 63,
                "video_token_id": 62,
            },
        ),
        4,
        {"pixel_values": _pixels(32, 3 * 2 * 8 * 8), **_GRID},
    ),
    "llava": Case(
        "LlavaForConditionalGeneration",
        (
            "llava",
            {
                "vision_config": _VIT,
                "text_config": {**_LLAMA, "model_type": "llama"},
                "image_token_index": IMAGE,
            },
        ),
        4,
        {"pixel_values": _pixels(2, 3, 16, 16)},
    ),
    "gemma3": Case(
        "Gemma3ForConditionalGeneration",
        (
            "gemma3",
            {
                "vision_config": {**_VIT, "model_type": "siglip_vision_model"},
                "text_config": {**_LLAMA, "sliding_window": 64},
                "image_token_index": IMAGE,
                "mm_tokens_per_image": 4,
            },
        ),
        4,
        {"pixel_values": _pixels(2, 3, 16, 16)},
    ),
    "mllama": Case(
        "MllamaForConditionalGeneration",
        (
            "mllama",
            {
                "vision_config": {
                    "hidden_size": 64,
                    "intermediate_size": 96,
                    "num_hidden_layers": 2,
                    "num_global_layers": 1,
                    "attention_heads": 4,
                    "image_size": 16,
                    "patch_size": 8,
                    "max_num_tiles": 1,
                    "vision_output_dim": 128,
                    "intermediate_layers_indices": [0],
                    "supported_aspect_ratios": [[1, 1]],
                },
                "text_config": {**_LLAMA, "num_hidden_layers": 3, "cross_attention_layers": [1]},
                "image_token_index": IMAGE,
            },
        ),
        1,
        {
            "pixel_values": _pixels(2, 1, 1, 3, 16, 16),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(2, 24, 1, 1, dtype=torch.long),
        },
    ),
    "llama4": Case(
        "Llama4ForConditionalGeneration",
        (
            "llama4",
            {
                "vision_config": {
                    "hidden_size": 64,
                    "intermediate_size": 256,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "image_size": 32,
                    "patch_size": 8,
                    "vision_output_dim": 64,
                    "projector_input_dim": 64,
                    "projector_output_dim": 64,
                },
                "text_config": {
                    **_LLAMA,
                    "intermediate_size_mlp": 96,
                    "num_local_experts": 4,
                    "num_experts_per_tok": 1,
                    "interleave_moe_layer_step": 2,
                },
                "image_token_index": IMAGE,
            },
        ),
        4,
        {"pixel_values": _pixels(2, 3, 32, 32)},
    ),
}


def make(name, dtype=torch.float32):
    """Make a model of a case."""
    import transformers

    kind, fields = CASES[name].config
    config = transformers.CONFIG_MAPPING[kind](**fields)
    return getattr(transformers, CASES[name].model)._from_config(config, dtype=dtype).eval()


def outline(name):
    """Make a model of a case on the meta device."""
    with torch.device("meta"):
        return make(name)


def build(name, dtype=torch.float32):
    """Make a model with random parameters, the same each time."""
    torch.manual_seed(0)
    model = make(name, dtype)
    for key, parameter in model.named_parameters():
        is_gain = parameter.dim() == 1 and not key.endswith("bias")
        torch.nn.init.normal_(parameter.detach(), mean=0.5 * is_gain, std=0.1)
    return model


def text(count=24):
    """Two sequences of tokens, without images."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (2, count), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def images(name, dtype=torch.float32):
    """Two sequences of tokens, each with an image, as a processor returns them."""
    case, batch = CASES[name], text()
    batch["input_ids"][:, 2 : 2 + case.tokens] = IMAGE
    if name in ("gemma3", "qwen2_5_vl", "qwen3_vl"):
        is_image = batch["input_ids"] == IMAGE
        batch["token_type_ids" if name == "gemma3" else "mm_token_type_ids"] = is_image.long()
    return batch | {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in case.images.items()
    }
