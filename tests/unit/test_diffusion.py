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
from quark.torch.digests import check_unchanged
from quark.torch.export import diffusers_loading
from quark.torch.quantization.config.algo import AWQConfig, GPTQConfig, SVDQuantConfig
from quark.torch.quantization.preparation import quantized_layers
from tests.models.diffusion import (
    CALL,
    DECODER,
    MODELS,
    config_of,
    dit_pipeline,
    image,
    inputs,
    make,
    output,
)

pytestmark = pytest.mark.client("diffusers")


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path):
    """Inputs that are not tokens calibrate; the checkpoint computes the same."""
    model, before = make(name), output(make(name), name)
    ModelQuantizer(config_of("int8")).quantize_model(model, [inputs(name)])
    ModelExporter(None, tmp_path / "out").export_safetensors_model(ModelQuantizer.freeze(model))
    loaded = ModelImporter(tmp_path / "out", "safetensors").import_model_info(make(name))
    assert torch.equal(output(loaded, name), output(model, name))
    assert 0 < (output(model, name) - before).norm() < 0.2 * before.norm()


@pytest.mark.parametrize(("name", "share"), [("dit", 0.95), ("flux", 0.5)])
def test_low_rank_branches(name, share, tmp_path):
    """After adaptive norms no factor can be merged; layers multiply their inputs themselves."""
    before, models = output(make(name), name), {}
    options = SVDQuantConfig(svd_rank=16, min_layer_size=0)
    for way, algorithms in {"plain": None, "divided": [options]}.items():
        model = make(name)
        around = [n for n, _ in model.named_modules() if n and "blocks" not in n]
        config = config_of("mxfp4", algo_config=algorithms, exclude=around)
        ModelQuantizer(config).quantize_model(model, [inputs(name)])
        models[way] = ModelQuantizer.freeze(model)
    losses = {way: (output(model, name) - before).norm() for way, model in models.items()}
    assert losses["divided"] < share * losses["plain"]
    ModelExporter(None, tmp_path / "out").export_safetensors_model(models["divided"])
    read = ModelImporter(tmp_path / "out", "safetensors").import_model_info(make(name))
    for layer, module in models["divided"].named_modules():
        if getattr(module, "low_rank_down", None) is not None:
            assert torch.equal(read.get_submodule(layer).low_rank_down, module.low_rank_down)
    # Products of layers in float depend on where weights begin in memory, on some processors.
    found, expected = output(read, name), output(models["divided"], name)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.fixture
def pipeline():
    return dit_pipeline()


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
    check_unchanged(tmp_path / "out" / "transformer")
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
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(diffusers_loading, "import_module", missing)
    with pytest.raises(ImportError, match="pip install diffusers"):
        load_pipeline(tmp_path)


def test_a_component_that_is_not_called_leaves_the_others_in_float(unchanged):
    class Pipeline:
        components = {"one": torch.nn.Linear(64, 8), "two": torch.nn.Linear(64, 8)}  # noqa: RUF012

    one = Pipeline.components["one"].eval()
    configs = {"one": config_of("fp8"), "two": config_of("fp8")}
    with unchanged(one), pytest.raises(ValueError, match="two: the pipeline did not call it"):
        quantize_pipeline(Pipeline, configs, lambda _: one(torch.randn(2, 64)))


def test_quantization_is_all_or_nothing(pipeline, unchanged):
    """The VAE fails after GPTQ has changed the weights of the transformer."""
    weight = pipeline.vae.decoder.conv_in.weight
    sound = weight.detach().clone()
    weight.data[0, 0, 0, 0] = torch.nan
    gptq = config_of("int4_wo_32", algo_config=[GPTQConfig()])
    configs = {"transformer": gptq, "vae": config_of("int8_wo")}
    fails = pytest.raises(ValueError, match=r"vae: decoder\.conv_in")
    with unchanged(pipeline.transformer), unchanged(pipeline.vae), fails:
        quantize_pipeline(pipeline, configs, [{**CALL, "output_type": "np"}])
    weight.data.copy_(sound)
    quantize_pipeline(pipeline, configs, [{**CALL, "output_type": "np"}])
    assert any(True for _ in quantized_layers(pipeline.transformer))


def test_awq_names_why_nothing_can_be_rescaled(unchanged):
    """SD3 joins values of images and text: two layers would need the same factors."""
    model = make("sd3")
    config = config_of("int8_wo", algo_config=[AWQConfig()])
    reason = r"transformer_blocks\.0\.attn\.add_v_proj: is joined with values of another layer"
    with unchanged(model), pytest.raises(ValueError, match=reason):
        ModelQuantizer(config).quantize_model(model, [inputs("sd3")])
    quantizer = ModelQuantizer(config_of("int8_wo", algo_config=[GPTQConfig()]))
    before = output(model, "sd3")
    after = output(quantizer.quantize_model(model, [inputs("sd3")]), "sd3")
    assert 0 < (after - before).norm() < 0.02 * before.norm()
