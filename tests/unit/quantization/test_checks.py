"""What is not finite is refused by name before the model runs, whatever the algorithm."""

import pytest
import torch

from quark.torch import ModelQuantizer, collect_statistics
from quark.torch.algorithm.registry import ALGORITHMS
from quark.torch.export.recognition import load_checkpoint
from quark.torch.quantization.config.algo import ALGO_CONFIGS
from tests.configurations import preset
from tests.models.architectures import build, small_config, tokens, varied

OPTIONS = {
    "autoround": {"iters": 1},
    "blockwise_joint_tuning": {"epochs": 1},
    "rotation": {"r2": True, "r4": True},
    "svdquant": {"svd_rank": 4, "min_layer_size": 0},
}
SCHEME = "w_uint4_per_group_a_int8_per_tensor"
PLACES = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]


def config_of(name):
    return preset(SCHEME, *([] if name is None else [ALGO_CONFIGS[name](**OPTIONS.get(name, {}))]))


@pytest.fixture
def refused(unchanged):
    """Quantize, which must fail before the model runs, or after, and leave the model as it was."""

    def refused(model, name, data, said, runs=False):
        calls = []
        model.register_forward_pre_hook(lambda *_: calls.append(1))
        with unchanged(model), pytest.raises(ValueError, match=said):
            ModelQuantizer(config_of(name)).quantize_model(model, data)
        assert bool(calls) is runs

    return refused


@pytest.mark.parametrize("name", [None, *ALGORITHMS])
def test_a_parameter(name, refused):
    place = PLACES[len(name or "") % 3]
    model = varied("llama")
    model.get_parameter(place).data.view(-1)[5] = torch.nan if name else -torch.inf
    refused(model, name, [tokens()], rf"^{place} has NaN or infinite values: ")


def test_a_parameter_of_an_expert(refused):
    model = varied("mixtral")
    model.model.layers[1].mlp.experts.down_proj.data[2, 3, 4] = torch.inf
    refused(model, None, [tokens()], r"layers\.1\..*experts\.2\.w2\.weight has NaN or infinite")


@pytest.mark.parametrize("name", [None, *ALGORITHMS])
def test_a_batch(name, refused):
    """Embeddings in place of tokens may be infinite."""
    model = varied("llama")
    embedded = model.get_input_embeddings()(tokens()).detach()
    wrong = embedded.clone()
    wrong[0, 3, 7] = torch.inf
    data = [{"inputs_embeds": embedded}, {"inputs_embeds": wrong}]
    refused(model, name, data, "^Batch 1 of the dataloader has NaN or infinite .* inputs_embeds")


@pytest.mark.parametrize("name", [None, *ALGORITHMS])
def test_what_arises_inside(name, refused):
    """The second batch overflows in the second block."""
    model = varied("llama", attention_bias=name == "bias_correction")

    def overflow(module, args):
        return (args[0] * 1e38 * 1e38,) if args[0].shape[1] == 9 else None

    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(overflow)
    first, second = (torch.randint(10, 60, (1, length)) for length in (8, 9))
    said = "(inputs? of model.layers.1.mlp.down_proj|outputs of model.layers.1) (was|were) NaN or"
    refused(model, name, [first, second], said, runs=True)


def test_statistics(unchanged):
    model = varied("llama")
    model.get_parameter(PLACES[0]).data[0, 0] = torch.nan
    with unchanged(model), pytest.raises(ValueError, match=r"up_proj\.weight has NaN or infinite"):
        collect_statistics(model, [tokens()])


class TestParametersThatAPassChanges:
    """RWKV rescales weights when it runs first; packed ones could not be written to."""

    RESCALED = r"rwkv\.blocks\.0\.attention\.output\.weight.* changed in place .*rescale_every=0"

    @pytest.mark.parametrize("scheme", ["int8_wo", SCHEME])
    @pytest.mark.parametrize("has_run", [False, True])
    def test_the_model_is_refused(self, unchanged, scheme, has_run):
        model = varied_rwkv()
        if has_run:
            model(tokens())
        with unchanged(model), pytest.raises(ValueError, match=self.RESCALED):
            ModelQuantizer(preset(scheme)).quantize_model(model, [tokens()])

    def test_files_are_refused(self, tmp_path):
        varied_rwkv().save_pretrained(tmp_path / "float")
        with pytest.raises(ValueError, match=self.RESCALED):
            ModelQuantizer(preset("int8_wo")).direct_quantize_checkpoint(
                tmp_path / "float", tmp_path / "quantized"
            )
        assert not (tmp_path / "quantized").exists()

    def test_without_the_option_the_checkpoint_has_the_bits_of_the_model(self, export):
        model = varied_rwkv(rescale_every=0)
        model = ModelQuantizer(preset("int8_wo")).quantize_model(model)
        expected = ModelQuantizer.freeze(model)(tokens()).logits
        assert torch.equal(load_checkpoint(export(model))(tokens()).logits, expected)


def varied_rwkv(**options):
    return build(small_config("rwkv", **options), torch.float32)
