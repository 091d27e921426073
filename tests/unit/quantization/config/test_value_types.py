"""Values of files are checked against the annotations of what they are read into."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

import numpy as np
import pytest

from quark.torch.export.onnx.writer import OnnxOptions
from quark.torch.quantization.config.algo import ALGO_CONFIGS, AWQConfig, OnlineRotationConfig
from quark.torch.quantization.config.algo_lookup import algo_config_from_dict
from quark.torch.quantization.config.config import Config, PassOptions
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import QSchemeType
from quark.torch.quantization.config.value_types import check_types, check_value
from tests.mutations import mutations

CONFIG = Config(
    scheme("fp8"),
    layer_quant_config={"*.q_proj": scheme("int4_wo_32"), "*.up_proj": scheme("mxfp4")},
    exclude=["lm_head"],
    algo_config=[AWQConfig(scaling_layers=[{"prev_op": "a", "layers": ["b"]}])],
    shared_scale_groups=[["q_proj", "k_proj"]],
)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_configurations(seed):
    """Each is read, or refused with one kind of error that says where."""
    refused = 0
    for what, data in mutations(CONFIG.to_dict(everything=True), 200, seed):
        try:
            Config.from_dict(data)
        except ValueError as error:
            refused += 1
            path = what.split()[1].split(".")
            assert what[0] != "r" or any(part in str(error) for part in path), (what, error)
        except Exception as error:
            raise AssertionError(what) from error
    assert refused > 60


@pytest.mark.parametrize("name", ALGO_CONFIGS)
def test_mutated_options(name):
    data = asdict(ALGO_CONFIGS[name]())
    if "scaling_layers" in data:
        data["scaling_layers"] = [{"prev_op": "a", "layers": ["b"]}]
    if name == "rotation":
        entry = {"prev_modules": ["a"], "next_modules": ["b"], "norm_module": "c"}
        data["scaling_layers"] = {"first_layer": [entry]}
        data["online_config"] = {"online_rotation_layers": ["a"]}
    for what, changed in mutations(data, 100):
        try:
            options = algo_config_from_dict(changed)
        except ValueError:
            continue
        except Exception as error:
            raise AssertionError(what) from error
        assert algo_config_from_dict(asdict(options)) == options


@pytest.mark.parametrize(
    ("value", "hint", "said"),
    [
        (True, int, "x: expected an integer, got True"),
        (10**30, int, "x: expected an integer, got 1000"),
        (1, bool, "x: expected true or false, got 1"),
        ("1", float, "x: expected a number, got '1'"),
        (float("nan"), float, "x: expected a number, got nan"),
        (["a", 1], list[str], r"x\[1\]: expected a text, got 1"),
        ({"a": [1, None]}, dict[str, list[int]], r"x\.a\[1\]: expected an integer, got None"),
        ({"a": 1}, list[int] | None, "x: expected a list or null, got {'a': 1}"),
        ([1], tuple[int, int] | None, r"x: expected 2 values, got \[1\]"),
        ([1, "a"], tuple[int, int], r"x\[1\]: expected an integer"),
        (3, QSchemeType | None, "x: expected a name or null, got 3"),
    ],
)
def test_refused(value, hint, said):
    with pytest.raises(ValueError, match=said):
        check_value(value, hint, "x")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, float),
        (None, int | None),
        ("per_tensor", QSchemeType),
        (QSchemeType.per_tensor, QSchemeType),
        ([[1, 2]], list[tuple[int, int]]),
        ({"a": {}}, dict[str, dict[str, int]]),
    ],
)
def test_accepted(value, hint):
    check_value(value, hint, "x")


def test_the_message_has_the_path():
    data = CONFIG.to_dict()
    data["layer_quant_config"]["*.q_proj"]["weight"]["group_size"] = "many"
    said = r"layer_quant_config\.\*\.q_proj: weight: group_size: expected an integer or null, got"
    with pytest.raises(ValueError, match=said):
        Config.from_dict(data)


CLASSES = [*ALGO_CONFIGS.values(), OnlineRotationConfig, PassOptions, JsonExporterConfig]
CLASSES += [Config, OnnxOptions, QuantizationSpec]
REQUIRED = {QuantizationSpec: {"dtype": "int8", "qscheme": "per_tensor"}}
FLAGS_AND_NUMBERS = [
    pytest.param(cls, field.name, kind, id=f"{cls.__name__}.{field.name}")
    for cls in CLASSES
    for field in fields(cls)
    for kind in ("bool", "int", "float")
    if field.type in (kind, f"{kind} | None")
]


@pytest.mark.parametrize(("cls", "name", "kind"), FLAGS_AND_NUMBERS)
def test_options_of_another_type_are_refused(cls, name, kind):
    """A text is true as a flag, so it would turn on what it names."""
    expected = {"bool": "True or False", "int": "an integer", "float": "a number"}[kind]
    for value in ("no", [1]):
        with pytest.raises((TypeError, ValueError)) as caught:
            cls(**{**REQUIRED.get(cls, {}), name: value})
        assert name in str(caught.value)
        is_rule = isinstance(caught.value, ValueError)  # a rule of the class that says more
        assert is_rule or f"expected {expected}" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "hint", "said"),
    [
        ("no", bool, "x: expected True or False, got 'no'"),
        (1, bool, "x: expected True or False, got 1"),
        (2.5, int | None, "x: expected an integer or None, got 2.5"),
        ("ab", Sequence[str], "x: expected a list, got 'ab'"),
        ((1,), Sequence[str], r"x\[0\]: expected a text, got 1"),
        ([1], Mapping[str, int] | None, r"x: expected a dict or None, got \[1\]"),
        ({"a": 1}, Mapping[str, Mapping[int, str]], r"x\.a: expected a dict, got 1"),
    ],
)
def test_arguments_of_another_type_are_refused(value, hint, said):
    with pytest.raises(TypeError, match=said):
        check_types(hint, x=value)


def test_numbers_of_numpy_are_numbers():
    check_types(int, x=np.int64(3))
    check_types(float, x=np.float32(0.5))
