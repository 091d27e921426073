"""Pipelines of diffusers are quantized by component, written and loaded again."""

import json

import pytest
import torch

from quark.torch import (
    ModelExporter,
    ModelImporter,
    ModelQuantizer,
    export_pipeline,
    load_pipeline,
    quantize_pipeline,
)
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.preparation import quantized_layers

pytestmark = pytest.mark.client("diffusers")

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


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path):
    """Inputs that are not tokens calibrate; the checkpoint computes the same."""
    model, before = make(name), output(make(name), name)
    ModelQuantizer(config_of("int8")).quantize_model(model, [inputs(name)])
    ModelExporter(None, tmp_path / "out").export_safetensors_model(ModelQuantizer.freeze(model))
    loaded = ModelImporter(tmp_path / "out", "safetensors").import_model_info(make(name))
    assert torch.equal(output(loaded, name), output(model, name))
    assert 0 < (output(model, name) - before).norm() < 0.2 * before.norm()


@pytest.fixture
def pipeline():
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


@pytest.mark.parametrize(
    "calls",
    [[CALL], lambda pipeline: pipeline(**CALL)],
    ids=["arguments", "a function"],
)
def test_a_pipeline(pipeline, calls, tmp_path):
    before = image(pipeline)
    configs = {"transformer": config_of("fp8"), "vae": DECODER}
    assert quantize_pipeline(pipeline, configs, calls) is pipeline
    names = {n for n, _ in quantized_layers(pipeline.vae)}
    assert names
    assert all(n.startswith(("decoder.", "post_quant_conv")) for n in names)
    assert "forward" not in pipeline.vae.__dict__
    after = image(pipeline)
    assert 0 < (after - before).abs().mean() < 0.2
    export_pipeline(pipeline, tmp_path / "out")
    loaded = load_pipeline(tmp_path / "out")
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is type(pipeline)
    assert type(loaded.vae) is type(make("vae"))
    assert torch.equal(image(loaded), after)


def test_other_components_are_written_as_they_are(pipeline, tmp_path):
    import diffusers

    quantize_pipeline(pipeline, {"transformer": config_of("int4_wo_32")})
    export_pipeline(pipeline, tmp_path / "out")
    vae = diffusers.AutoencoderKL.from_pretrained(tmp_path / "out" / "vae")
    for name, value in vae.state_dict().items():
        assert torch.equal(value, pipeline.vae.state_dict()[name])
    described = json.loads((tmp_path / "out/transformer/config.json").read_text())
    assert described["_class_name"] == "DiTTransformer2DModel"
    assert described["num_layers"] == 2
    with pytest.raises(ValueError, match="Unknown quantization type, got quark"):
        diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")


def test_a_text_encoder(tmp_path):
    """Prompts go through the tokenizer; the text encoder is a model of Transformers."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters)]
    tokenizer = CLIPTokenizer(
        {word: index for index, word in enumerate(words)}, [], model_max_length=8
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    text = CLIPTextConfig(**sizes, vocab_size=54, num_hidden_layers=2, max_position_embeddings=8)
    pipeline = diffusers.StableDiffusionPipeline(
        unet=make("unet"),
        vae=make("vae"),
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=tokenizer,
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    calls = [{"prompt": "a cat", "num_inference_steps": 1, "height": 16, "width": 16}]
    quantize_pipeline(
        pipeline, {"unet": config_of("fp8"), "text_encoder": config_of("int8")}, calls
    )
    export_pipeline(pipeline, tmp_path / "out")
    loaded = load_pipeline(tmp_path / "out")
    ids = torch.tensor([[0, 2, 3, 1]])
    with torch.no_grad():
        states = [p.text_encoder(ids).last_hidden_state for p in (pipeline, loaded)]
    assert torch.equal(*states)
    assert torch.equal(output(loaded.unet, "unet"), output(pipeline.unet, "unet"))
    assert not any(True for _ in quantized_layers(pipeline.vae))


def test_refusals(pipeline, tmp_path, unchanged):
    with pytest.raises(ValueError, match=r"component: 'transfomer' is unknown.*'transformer'"):
        quantize_pipeline(pipeline, {"transfomer": config_of("int8_wo")})
    with pytest.raises(ValueError, match="component: 'scheduler' is unknown"):
        quantize_pipeline(pipeline, {"scheduler": config_of("int8_wo")})
    with unchanged(pipeline.transformer):
        with pytest.raises(ValueError, match="transformer: Static activation ranges need"):
            quantize_pipeline(pipeline, {"transformer": config_of("fp8")})
        with pytest.raises(ValueError, match="transformer: the pipeline did not call it"):
            quantize_pipeline(pipeline, {"transformer": config_of("fp8")}, lambda _: None)
    with pytest.raises(ValueError, match="vae: No data reached encoder"):
        quantize_pipeline(pipeline, {"vae": config_of("fp8")}, [CALL])
    with pytest.raises(ValueError, match="No component is quantized"):
        export_pipeline(pipeline, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_pipelines(pipeline, tmp_path):
    quantize_pipeline(pipeline, {"transformer": config_of("int8_wo")})
    export_pipeline(pipeline, tmp_path / "out")
    index = tmp_path / "out/model_index.json"
    whole = index.read_text()
    index.write_text(whole.replace("DiTTransformer2DModel", "os"))
    with pytest.raises(ValueError, match="its class is 'os', which diffusers"):
        load_pipeline(tmp_path / "out")
    index.write_text("[]")
    with pytest.raises(ValueError, match="does not describe a pipeline"):
        load_pipeline(tmp_path / "out")
    index.write_text(whole)
    config = tmp_path / "out/transformer/config.json"
    config.write_text(config.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    with pytest.raises(ValueError, match="missing"):
        load_pipeline(tmp_path / "out")


def test_without_diffusers(monkeypatch, tmp_path):
    from quark.torch import diffusion

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(diffusion, "import_module", missing)
    with pytest.raises(ImportError, match="pip install diffusers"):
        load_pipeline(tmp_path)


def test_a_component_that_is_not_called_leaves_the_others_in_float(unchanged):
    class Pipeline:
        components = {"one": torch.nn.Linear(64, 8), "two": torch.nn.Linear(64, 8)}  # noqa: RUF012

    one = Pipeline.components["one"].eval()
    configs = {"one": config_of("fp8"), "two": config_of("fp8")}
    with unchanged(one), pytest.raises(ValueError, match="two: the pipeline did not call it"):
        quantize_pipeline(Pipeline, configs, lambda _: one(torch.randn(2, 64)))
