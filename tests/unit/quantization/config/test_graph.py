import json

import pytest

from quark.torch.quantization.config.config import Config, PassOptions, ShiftLimits

OPTIONS = {
    "pass_options": PassOptions(hard_activations=True, largest_pool=64),
    "shift_limits": ShiftLimits(cut=(1, 12), pool=(-3, 3)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_graphs_survive_json(name):
    config = Config(quant_mode="fx_graph_mode", **{name: OPTIONS[name]})
    for everything in (False, True):
        data = json.loads(json.dumps(config.to_dict(everything)))
        assert Config.from_dict(data) == config
    assert name not in Config().to_dict()  # other tools read this file


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"pass_options": {"largest_pol": 4}}, "largest_pol.*largest_pool"),
        ({"pass_options": {"largest_pool": "4"}}, "pass_options.largest_pool: expected an integer"),
        ({"pass_options": {"largest_pool": 1}}, r"pass_options\.largest_pool must be at least 2"),
        ({"shift_limits": {"cut": [0]}}, "shift_limits.cut: expected 2 values"),
        ({"shift_limits": {"cut": [5, 0]}}, "shift_limits: cut: expected two integers"),
        ({"shift_limits": [0, 16]}, "shift_limits: expected an object"),
    ],
)
def test_wrong_options_of_graphs_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        Config.from_dict(data)
