"""Tiny random models and a pipeline of diffusers, with inputs."""

import torch

from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme

_HEADS = {"attention_head_dim": 8, "num_attention_heads": 4}
_UNET = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "sample_size": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
    "attention_head_dim": 8,
}
_VAE = {
    "block_out_channels": [32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
    "norm_num_groups": 8,
    "sample_size": 16,
}
_DIT = {
    **_HEADS,
    "sample_size": 8,
    "num_layers": 2,
    "patch_size": 4,
    "in_channels": 4,
    "out_channels": 8,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
}
_WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "text_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
_FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}
_SD3 = {
    **_HEADS,
    "sample_size": 8,
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 32,
    "out_channels": 4,
}
IMAGE = {"hidden_states": (1, 4, 8, 8)}
TEXT = {"encoder_hidden_states": (1, 5, 32)}
POOLED = {"pooled_projections": (1, 32)}
# Class, configuration, shapes of random inputs; the step of the diffusion is added.
MODELS = {
    "unet": ("UNet2DConditionModel", _UNET, {"sample": (1, 4, 8, 8)} | TEXT),
    "dit": ("DiTTransformer2DModel", _DIT, IMAGE),
    "flux": (
        "FluxTransformer2DModel",
        _FLUX,
        {"hidden_states": (1, 16, 4), "img_ids": (16, 3), "txt_ids": (5, 3)} | TEXT | POOLED,
    ),
    "sd3": ("SD3Transformer2DModel", _SD3, IMAGE | TEXT | POOLED),
    "vae": ("AutoencoderKL", _VAE, {"sample": (1, 3, 16, 16)}),
    "wan": ("WanTransformer3DModel", _WAN, {"hidden_states": (1, 16, 2, 8, 8)} | TEXT),
}


def make(name):
    """A tiny random model of diffusers."""
    import diffusers

    kind, fields, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(diffusers, kind)(**fields).eval()


def inputs(name):
    """Random inputs of a model."""
    generator = torch.Generator().manual_seed(1)
    given = {n: torch.randn(s, generator=generator) for n, s in MODELS[name][2].items()}
    if name != "vae":
        given["timestep"] = torch.tensor([3])
    if name == "dit":
        given["class_labels"] = torch.tensor([1])
    return given


def config_of(name, **rest):
    return Config(scheme(name, 32), **rest)


@torch.no_grad()
def output(model, name):
    return model(**inputs(name), return_dict=False)[0]


def dit_pipeline():
    """A pipeline of a DiT, whose VAE is called by ``decode``."""
    import diffusers

    scheduler = diffusers.DDIMScheduler()
    pipeline = diffusers.DiTPipeline(make("dit"), make("vae"), scheduler)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


CALL = {"class_labels": [1, 2], "num_inference_steps": 2, "guidance_scale": 1.0}
DECODER = config_of("int8", exclude=["encoder.*", "quant_conv"])


def image(pipeline):
    generator = torch.Generator().manual_seed(3)
    made = pipeline(**CALL, generator=generator, output_type="np").images
    return torch.from_numpy(made)
