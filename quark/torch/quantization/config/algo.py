"""Options of the algorithms: data only, one class each, found by name in files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quark.torch.quantization.config.name_lookup import one_of, unknown


class AlgoConfig:
    """Base of the options of a quantization algorithm."""

    name: str


class PreQuantOptConfig(AlgoConfig):
    """Base of the options of a transformation that precedes quantization."""


@dataclass
class SmoothQuantConfig(PreQuantOptConfig):
    """SmoothQuant (Xiao et al. 2023): outliers move from activations into weights."""

    name: str = "smooth"
    alpha: float = 1
    scale_clamp_min: float = 1e-3
    scaling_layers: list[dict[str, Any]] = field(default_factory=list)
    model_decoder_layers: str = ""


@dataclass
class OnlineRotationConfig:
    """Rotations that stay in the forward pass."""

    shared_parallel: bool = True
    online_rotation_layers: list[str] | None = None
    use_input_prescale: bool = False


@dataclass
class RotationConfig(PreQuantOptConfig):
    """QuaRot and SpinQuant rotations (Ashkboos et al. 2024; Liu et al. 2024)."""

    scaling_layers: dict[str, list[dict[str, Any]]] | list[Any] = field(default_factory=dict)
    name: str = "rotation"
    r1: bool = True
    r2: bool = False
    r3: bool = False
    r4: bool = False
    rotation_size: int | None = None
    random_r1: bool = False
    random_r2: bool = False
    backbone: str = "model"
    model_decoder_layers: str = "model.layers"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    self_attn: str = "self_attn"
    mlp: str = "mlp"
    online_r1_rotation: bool | None = None
    online_config: OnlineRotationConfig | None = None
    trainable: bool = False
    train_smooth: bool | None = None
    smooth_positions: list[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.online_config, dict):
            given = _options(self.online_config, OnlineRotationConfig, "option of online_config")
            self.online_config = OnlineRotationConfig(**given)


@dataclass
class QuaRotConfig(RotationConfig):
    """All four rotations of QuaRot."""

    name: str = "quarot"
    r2: bool = True
    r3: bool = True
    r4: bool = True
    optimized_rotation_path: str | None = None


@dataclass
class AutoSmoothQuantConfig(AlgoConfig):
    """SmoothQuant with the strength searched for each layer."""

    name: str = "autosmoothquant"
    scaling_layers: list[dict[str, Any]] | None = None
    model_decoder_layers: str | None = None
    compute_scale_loss: str | None = "MSE"


@dataclass
class AWQConfig(AlgoConfig):
    """AWQ (Lin et al. 2024): activation-aware weight scaling and clipping."""

    name: str = "awq"
    scaling_layers: list[dict[str, Any]] = field(default_factory=list)
    model_decoder_layers: str = ""


class RoundingConfig(AlgoConfig):
    """Base of the options of what rounds the weights of decoder blocks for good."""

    inside_layer_modules: list[str]
    model_decoder_layers: str


@dataclass
class SolverConfig(RoundingConfig):
    """Options of what rounds weights column by column."""

    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""
    block_size: int = 128
    desc_act: bool = True
    static_groups: bool = True

    def __post_init__(self) -> None:
        if self.desc_act and not self.static_groups:
            raise ValueError(
                f"{type(self).__name__}: desc_act=True needs static_groups=True, since the order "
                "of columns is not stored. Set static_groups=True or desc_act=False."
            )


@dataclass
class GPTQConfig(SolverConfig):
    """GPTQ (Frantar et al. 2023)."""

    name: str = "gptq"
    damp_percent: float = 0.01
    true_sequential: bool = False


@dataclass
class GPTAQConfig(GPTQConfig):
    """GPTAQ (Li et al. 2025): GPTQ against the inputs of the float model."""

    name: str = "gptaq"
    alpha: float = 0.25


@dataclass
class QronosConfig(SolverConfig):
    """Qronos (Zhang et al. 2025)."""

    name: str = "qronos"
    alpha: float = 1e-3
    beta: float = 1e4


@dataclass
class YaqaConfig(SolverConfig):
    """YAQA (Tseng et al. 2025): rounding that knows which errors of outputs matter."""

    name: str = "yaqa"
    damp_percent: float = 0.01
    output_damp_percent: float = 0.1


@dataclass
class AutoRoundConfig(RoundingConfig):
    """AutoRound (Cheng et al. 2024): rounding learned by signed gradient descent."""

    name: str = "autoround"
    iters: int = 200
    lr: float = 1 / 200
    enable_minmax_tuning: bool = True
    minmax_lr: float = 1 / 200
    batch_size: int = 8
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""


@dataclass
class SVDQuantConfig(AlgoConfig):
    """SVDQuant (Li et al. 2025): a low-rank branch takes the outliers."""

    name: str = "svdquant"
    svd_rank: int = 32
    smooth_alpha: float = 0.5
    search_alpha: bool = True
    alpha_candidates: list[float] | None = None
    alpha_search_max_samples: int = 8
    exclude_patterns: list[str] = field(default_factory=list)
    min_layer_size: int = 256
    use_gptq: bool = False
    gptq_n_bits: int = 4
    gptq_symmetric: bool = True
    gptq_group_size: int = -1
    gptq_blocksize: int = 128
    gptq_percdamp: float = 0.01
    gptq_actorder: bool = False


ALGO_CONFIGS: dict[str, type[AlgoConfig]] = {
    cls.name: cls
    for cls in (
        SmoothQuantConfig,
        RotationConfig,
        QuaRotConfig,
        AutoSmoothQuantConfig,
        AWQConfig,
        GPTQConfig,
        GPTAQConfig,
        QronosConfig,
        YaqaConfig,
        AutoRoundConfig,
        SVDQuantConfig,
    )
}

# Options of earlier versions: what they are called now, None for those without effect.
_RENAMED: dict[str, str | None] = {
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "random": "random_r1",
    "random2": "random_r2",
    "online_had": "r4",
    "kv_cache_quant": "r3",
    "act_quant": None,
}


def algo_config_from_dict(data: dict[str, Any]) -> AlgoConfig:
    """Make the options of the algorithm that ``data["name"]`` names.

    Raises:
        ValueError: The name is missing, or it or an option is unknown.
    """
    if "name" not in data:
        raise ValueError(f"An algorithm needs a name: one of {', '.join(ALGO_CONFIGS)}.")
    name = one_of(str(data["name"]), ALGO_CONFIGS, "algorithm")
    options = _options(data, ALGO_CONFIGS[name], f"option of algorithm {name!r}")
    return ALGO_CONFIGS[name](**{**options, "name": name})


def _options(data: dict[str, Any], cls: type, what: str) -> dict[str, Any]:
    """Return ``data`` under the present names if all of it are fields of ``cls``."""
    known = sorted(f.name for f in fields(cls))
    options: dict[str, Any] = {}
    for key, value in data.items():
        name = key if key in known else _RENAMED.get(key, key)
        if name is None:
            continue
        if name not in known:
            raise ValueError(unknown(key, known, what))
        options[name] = value
    return options


def load_quant_algo_config_from_file(file_path: str | Path) -> AlgoConfig:
    """Read the options of one algorithm from a JSON file: its fields and its name.

    Raises:
        ValueError: The file is not a JSON object, or it has an unknown name or option.
    """
    try:
        data = json.loads(Path(file_path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file_path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file_path}: expected one JSON object, got {type(data).__name__}.")
    return algo_config_from_dict(data)


def load_pre_optimization_config_from_file(file_path: str | Path) -> AlgoConfig:
    """Read the options of a transformation that precedes quantization; see above."""
    return load_quant_algo_config_from_file(file_path)
