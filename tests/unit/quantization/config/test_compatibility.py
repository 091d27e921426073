"""Options of the documented API that have no effect warn; those not supported are refused."""

from dataclasses import replace

import pytest

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.algo import (
    OnlineRotationConfig,
    QronosConfig,
    QuaRotConfig,
    RotationConfig,
    SVDQuantConfig,
)
from quark.torch.quantization.config.compatibility import (
    IGNORED,
    REFUSED,
    check_compatibility,
    warn_about_ignored,
)
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import scheme, scheme_names

INT8 = scheme("int8_wo")


def with_spec(**changes):
    spec = replace(scheme("nvfp4").weight, **changes)
    return Config(INT8, layer_quant_config={"*down_proj": QuantizationConfig(weight=spec)})


CHANGED = {  # option -> configuration that sets it
    "gpu_resident_blocks": Config(INT8, gpu_resident_blocks=2),
    "target_device": Config(replace(INT8, target_device="CPU")),
    "enable_buffer_reuse": with_spec(enable_buffer_reuse=True),
    "max_input_numel": with_spec(max_input_numel=1),
    "backbone": Config(INT8, algo_config=[RotationConfig(backbone="transformer")]),
    "self_attn": Config(INT8, algo_config=[QuaRotConfig(self_attn="attn")]),
    "mlp": Config(INT8, algo_config=[RotationConfig(mlp="ffn")]),
    "shared_parallel": Config(
        INT8, algo_config=[RotationConfig(online_config=OnlineRotationConfig(False))]
    ),
    "quant_flow": Config(INT8, quant_flow="file2file"),
    "quant_mode": Config(INT8, quant_mode="fx_graph_mode"),
    "optimized_rotation_path": Config(
        INT8, algo_config=[QuaRotConfig(optimized_rotation_path="R.bin")]
    ),
    "alpha": Config(INT8, algo_config=[QronosConfig(alpha=0.1)]),
    **{
        name: Config(INT8, algo_config=[SVDQuantConfig(**{name: value})])
        for name, value in {
            "gptq_n_bits": 8,
            "gptq_symmetric": False,
            "gptq_group_size": 32,
        }.items()
    },
    "beta": Config(INT8, algo_config=[QronosConfig(beta=1.0)]),
}


def options(table):
    return [name for names in table.values() for name in names]


def test_every_option_of_the_tables_is_tried():
    assert sorted(CHANGED) == sorted([*options(IGNORED), *options(REFUSED)])


@pytest.mark.parametrize("name", options(IGNORED))
def test_without_effect(name, caplog):
    check_compatibility(CHANGED[name])
    warn_about_ignored(CHANGED[name])
    (message,) = caplog.messages
    assert f"{name}=" in message and "has no effect: " in message


@pytest.mark.parametrize("name", options(REFUSED))
def test_not_supported(name, build, unchanged):
    with pytest.raises(ValueError, match=rf"{name}.* supported|{name}.*(only|fixed|files)"):
        check_compatibility(CHANGED[name])
    model = build()
    with unchanged(model), pytest.raises(ValueError, match=name):
        ModelQuantizer(CHANGED[name]).quantize_model(model)


def test_no_default_warns_or_is_refused(caplog):
    algorithms = [QuaRotConfig(online_config=OnlineRotationConfig()), QronosConfig()]
    for name in scheme_names():
        config = Config(scheme(name), algo_config=algorithms)
        check_compatibility(config)
        warn_about_ignored(config)
    assert not caplog.messages


def test_each_warning_comes_once(caplog):
    warn_about_ignored(replace(CHANGED["max_input_numel"], global_quant_config=scheme("nvfp4")))
    config = CHANGED["max_input_numel"]
    layers = {**config.layer_quant_config, "*up_proj": config.layer_quant_config["*down_proj"]}
    caplog.clear()
    warn_about_ignored(replace(config, layer_quant_config=layers))
    assert len(caplog.messages) == 1


def test_a_cache_after_rotary_embedding_needs_a_cache(caplog):
    warn_about_ignored(Config(INT8, kv_cache_post_rope=True))
    assert caplog.messages == ["kv_cache_post_rope changes nothing without kv_cache_quant_config."]
