"""Windows are no longer than a model, whatever its configuration calls its length."""

import pytest
import typer

from quark.cli.lengths import window_length

CONFIGS = pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "max_position_embeddings": 64},
        {"model_type": "gpt2", "n_positions": 64},
        {"model_type": "llava", "text_config": {"model_type": "gpt2", "n_positions": 64}},
    ],
    ids=lambda config: config["model_type"],
)


@CONFIGS
def test_default(config):
    assert window_length(config, None, 512) == 64
    assert window_length(config, None, 32) == 32


@CONFIGS
def test_request(config):
    assert window_length(config, 64, 512) == 64
    with pytest.raises(typer.BadParameter, match="65 is more than the 64 tokens of the model"):
        window_length(config, 65, 512)


@pytest.mark.parametrize("config", [{"model_type": "bloom"}, {"model_type": "of a user"}, {}])
def test_without_a_maximum(config):
    assert window_length(config, 4096, 512) == 4096
