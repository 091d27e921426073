"""Options of algorithms and the files they are read from."""

import json
from dataclasses import asdict

import pytest

from quark.torch.quantization.config.algo import (
    ALGO_CONFIGS,
    AlgoConfig,
    GPTQConfig,
    OnlineRotationConfig,
    PreQuantOptConfig,
    QronosConfig,
    RotationConfig,
)
from quark.torch.quantization.config.algo_lookup import (
    algo_config_from_dict,
    load_pre_optimization_config_from_file,
    load_quant_algo_config_from_file,
)

# Documented options with their defaults, as files of the documented versions have them.
DOCUMENTED = {
    "smooth": {
        "alpha": 1,
        "scale_clamp_min": 1e-3,
        "scaling_layers": [],
        "model_decoder_layers": "",
    },
    "rotation": {
        "r1": True,
        "r2": False,
        "r3": False,
        "r4": False,
        "rotation_size": None,
        "random_r1": False,
        "random_r2": False,
        "backbone": "model",
        "model_decoder_layers": "model.layers",
        "v_proj": "self_attn.v_proj",
        "o_proj": "self_attn.o_proj",
        "self_attn": "self_attn",
        "mlp": "mlp",
        "online_r1_rotation": None,
        "online_config": None,
        "trainable": False,
        "train_smooth": None,
        "smooth_positions": None,
    },
    "quarot": {"r1": True, "r2": True, "r3": True, "r4": True, "optimized_rotation_path": None},
    "autosmoothquant": {
        "scaling_layers": None,
        "model_decoder_layers": None,
        "compute_scale_loss": "MSE",
    },
    "awq": {"scaling_layers": [], "model_decoder_layers": ""},
    "gptq": {
        "block_size": 128,
        "damp_percent": 0.01,
        "desc_act": True,
        "static_groups": True,
        "inside_layer_modules": [],
        "model_decoder_layers": "",
    },
    "gptaq": {"block_size": 128, "damp_percent": 0.01, "desc_act": True, "alpha": 0.25},
    "qronos": {
        "block_size": 128,
        "desc_act": True,
        "static_groups": True,
        "alpha": 1e-3,
        "beta": 1e4,
    },
    "autoround": {
        "iters": 200,
        "lr": 1 / 200,
        "enable_minmax_tuning": True,
        "minmax_lr": 1 / 200,
        "batch_size": 8,
    },
    "blockwise_joint_tuning": {
        "epochs": 5,
        "weight_lr": 1e-4,
        "qparam_lr": 1e-4,
        "weight_decay": 0.0,
        "qparam_weight_decay": 0.0,
        "min_lr_factor": 20.0,
        "max_grad_norm": 0.3,
        "batch_size": 2,
        "model_decoder_layers": "",
        "trainable_modules": [],
        "quant_trainable_modules": [],
    },
    "svdquant": {"svd_rank": 32, "smooth_alpha": 0.5, "search_alpha": True},
}

# A value other than the default for each kind of value.
OTHERS = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v * 2, str: lambda v: "x"}
OTHER_VALUES = {
    "alpha": 0.75,
    "rotation_size": 4,
    "online_r1_rotation": True,
    "train_smooth": True,
    "smooth_positions": ["a"],
    "trainable_modules": ["a"],
    "quant_trainable_modules": ["b"],
    "optimized_rotation_path": "x",
    "scaling_layers": [{"layers": ["a"]}],
    "model_decoder_layers": "x",
    "inside_layer_modules": ["a"],
}


def write(tmp_path, data):
    path = tmp_path / "algorithm.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_every_documented_algorithm_is_in_the_table():
    assert set(DOCUMENTED) <= set(ALGO_CONFIGS)
    assert all(cls().name == name for name, cls in ALGO_CONFIGS.items())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_defaults(name):
    options = asdict(ALGO_CONFIGS[name]())
    assert options["name"] == name
    assert {key: options[key] for key in DOCUMENTED[name]} == DOCUMENTED[name]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_file_with_a_name_alone_has_the_defaults(name, tmp_path):
    loaded = load_quant_algo_config_from_file(write(tmp_path, {"name": name}))
    assert type(loaded) is ALGO_CONFIGS[name]
    assert loaded == ALGO_CONFIGS[name]()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_file_with_every_option(name, tmp_path):
    """Each documented option of a file arrives; options and JSON are one thing."""
    given = {
        key: OTHER_VALUES[key] if key in OTHER_VALUES else OTHERS[type(value)](value)
        for key, value in DOCUMENTED[name].items()
        if key not in ("online_config", "desc_act")
    }
    given.pop("static_groups", None)
    loaded = load_quant_algo_config_from_file(str(write(tmp_path, {"name": name, **given})))
    assert {key: getattr(loaded, key) for key in given} == given
    assert algo_config_from_dict(json.loads(json.dumps(asdict(loaded)))) == loaded


def test_the_name_may_be_in_any_case():
    assert algo_config_from_dict({"name": "AWQ"}) == ALGO_CONFIGS["awq"]()


def test_file_of_the_earlier_name_is_the_same_reader(tmp_path):
    path = write(tmp_path, {"name": "smooth", "alpha": 0.5})
    loaded = load_pre_optimization_config_from_file(path)
    assert isinstance(loaded, PreQuantOptConfig)
    assert loaded == load_quant_algo_config_from_file(path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"name": "smooth", "num_attention_heads": 32, "num_key_value_heads": 8}, {}),
        ({"name": "rotation", "random": True}, {"random_r1": True, "random_r2": False}),
        ({"name": "quarot", "random": True, "random2": True}, {"random_r1": True, "random_r2": 1}),
        ({"name": "quarot", "online_had": False}, {"r3": True, "r4": False}),
        ({"name": "quarot", "kv_cache_quant": False, "act_quant": True}, {"r3": False, "r4": True}),
        ({"name": "gptq", "true_sequential": False}, {"true_sequential": False}),
    ],
    ids=["heads", "random", "random2", "online_had", "kv_cache_quant", "true_sequential"],
)
def test_options_of_earlier_versions(given, expected):
    loaded = algo_config_from_dict(given)
    assert {key: getattr(loaded, key) for key in expected} == expected
    assert ALGO_CONFIGS[given["name"]](**given) == loaded


def test_an_option_that_no_version_had_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'online_hadamard'"):
        ALGO_CONFIGS["quarot"](online_hadamard=True)


def test_online_rotations_become_an_object():
    online = {"shared_parallel": False, "online_rotation_layers": ["*down_proj"]}
    loaded = algo_config_from_dict({"name": "rotation", "online_config": online})
    assert loaded.online_config == OnlineRotationConfig(False, ["*down_proj"])
    assert algo_config_from_dict(asdict(loaded)) == loaded


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"name": "awq", "scaling_layer": []},
            "option of algorithm 'awq': 'scaling_layer'.*Did you mean 'scaling_layers'",
        ),
        ({"name": "awq", "random": True}, "option of algorithm 'awq': 'random' is unknown"),
        (
            {"name": "rotation", "online_config": {"share_parallel": True}},
            "option of online_config: 'share_parallel'.*Did you mean 'shared_parallel'",
        ),
        ({"name": "gptqq"}, "algorithm: 'gptqq' is unknown. Did you mean 'gptq'"),
        ({"name": None}, "algorithm: 'None' is unknown"),
        ({"alpha": 0.5}, "needs a name: one of smooth, rotation"),
        ([], "expected one JSON object, got list"),
        ("3", "expected one JSON object, got int"),
        ('{"name": "awq",', "not valid JSON"),
    ],
    ids=[
        "option",
        "renamed elsewhere",
        "online option",
        "name",
        "null name",
        "no name",
        "list",
        "number",
        "cut",
    ],
)
def test_file_is_refused(data, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        load_quant_algo_config_from_file(write(tmp_path, data))


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_quant_algo_config_from_file(tmp_path / "none.json")


@pytest.mark.parametrize("cls", [GPTQConfig, QronosConfig])
def test_an_order_of_columns_needs_static_groups(cls):
    with pytest.raises(ValueError, match=f"{cls.__name__}: desc_act=True needs static_groups=True"):
        cls(desc_act=True, static_groups=False)
    assert not cls(desc_act=False, static_groups=False).desc_act


def test_transformations_precede_quantization():
    first = {name for name, cls in ALGO_CONFIGS.items() if issubclass(cls, PreQuantOptConfig)}
    assert first == {"smooth", "cle", "rotation", "quarot"}
    assert all(issubclass(cls, AlgoConfig) for cls in ALGO_CONFIGS.values())
    assert issubclass(ALGO_CONFIGS["quarot"], RotationConfig)


def test_users_import_every_class_of_options_from_one_module():
    from quark.torch.quantization.config import config

    for cls in ALGO_CONFIGS.values():
        assert getattr(config, cls.__name__) is cls
        assert cls.__name__ in config.__all__
