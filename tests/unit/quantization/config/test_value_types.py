"""Values of files are checked against the annotations of what they are read into."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields

import numpy as np
import pytest

from quark.torch.distillation import DistillationOptions
from quark.torch.export.onnx.writer import OnnxOptions
from quark.torch.quantization.config.algo import (
    ALGO_CONFIGS,
    AutoRoundConfig,
    AWQConfig,
    GPTQConfig,
    OnlineRotationConfig,
    RotationConfig,
    SVDQuantConfig,
)
from quark.torch.quantization.config.algo_lookup import algo_config_from_dict
from quark.torch.quantization.config.compatibility import check_compatibility
from quark.torch.quantization.config.config import (
    Config,
    PassOptions,
    QuantizationConfig,
    ShiftLimits,
    TQTSpec,
)
from quark.torch.quantization.config.export import ExporterConfig, JsonExporterConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.spec_bases import (
    DataTypeSpec,
    ProgressiveSpec,
    ScaleQuantSpec,
    TwoStageSpec,
)
from quark.torch.quantization.config.spec_classes import SPEC_CLASSES
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


EVERY = [*CLASSES, *SPEC_CLASSES.values(), ProgressiveSpec, ScaleQuantSpec, QuantizationConfig]
EVERY += [DistillationOptions, ExporterConfig, ShiftLimits, TQTSpec]
INT8 = QuantizationSpec("int8", qscheme="per_tensor")
FILLED = {"ch_axis": -1, "group_size": 32, "block_size": 32}
NEVER = object()  # no field takes it
WRONG = [NEVER, 0, -4, 2.5, math.nan, math.inf, True, "zz", b"x", None, int, INT8]
WRONG += [[NEVER], ["zz"], {"zz": NEVER}, {3: "zz"}, [INT8, NEVER]]


def required(cls):
    """Arguments that a class needs."""
    if issubclass(cls, TwoStageSpec):
        return {"first_stage": INT8, "second_stage": INT8}
    if issubclass(cls, DataTypeSpec):
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        return {name: FILLED[name] for name in needed}
    return REQUIRED.get(cls, {})


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_any_value_of_any_field_is_taken_or_refused_by_name(cls):
    """Other kinds of errors come from code that met the value without a check."""
    for field in fields(cls):
        for value in WRONG:
            try:
                options = cls(**{**required(cls), field.name: value})
                if isinstance(options, (DataTypeSpec, TwoStageSpec)):
                    options.to_quantization_spec()
            except (TypeError, ValueError) as error:
                assert field.name in str(error), (field.name, value)
                continue
            except Exception as error:
                raise AssertionError((field.name, value)) from error
            assert value is not NEVER, field.name


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_numbers_are_finite(cls):
    """NaN passes comparisons that are written the other way round."""
    for field in fields(cls):
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises((TypeError, ValueError)):
                cls(**{**required(cls), field.name: value})


RANGES = [
    (Config, "min_kv_scale", -1, "Config.min_kv_scale must be at least 0, got -1"),
    (Config, "min_kv_scale", math.nan, "Config.min_kv_scale must be finite, got nan"),
    (JsonExporterConfig, "min_kv_scale", -1, "JsonExporterConfig.min_kv_scale must be at least 0"),
    (DistillationOptions, "kept_back", 1, "kept_back must be above 0 and below 1, got 1"),
    (RotationConfig, "rotation_size", 0, "RotationConfig.rotation_size must be at least 1, got 0"),
    (RotationConfig, "rotation_size", -4, "rotation_size must be at least 1, got -4"),
    (AutoRoundConfig, "lr", -1.0, "AutoRoundConfig.lr must be at least 0, got -1.0"),
    (GPTQConfig, "block_size", 0, "GPTQConfig.block_size must be at least 1, got 0"),
    (GPTQConfig, "damp_percent", 2, "GPTQConfig.damp_percent must be between 0 and 1, got 2"),
    (AWQConfig, "random_tokens", 1.5, "random_tokens must be between 0 and 1, got 1.5"),
    (SVDQuantConfig, "alpha_candidates", [0.5, 2], r"candidates\[1\] must be between 0 and 1"),
]


@pytest.mark.parametrize(("cls", "name", "value", "said"), RANGES)
def test_numbers_lie_in_their_ranges(cls, name, value, said):
    with pytest.raises(ValueError, match=said):
        cls(**{name: value})


def test_values_that_change_later_are_checked_before_work():
    config = Config(scheme("int8_wo"), algo_config=[GPTQConfig()])
    config.min_kv_scale = math.nan
    with pytest.raises(ValueError, match=r"Config\.min_kv_scale must be finite, got nan"):
        check_compatibility(config)
    config.min_kv_scale = 0.0
    config.algo_config[0].block_size = 0
    with pytest.raises(ValueError, match=r"GPTQConfig\.block_size must be at least 1, got 0"):
        check_compatibility(config)


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
