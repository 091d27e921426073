"""Options of the algorithms: one dataclass each, named in files by ``name``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quark.torch.quantization.config.algo_base import AlgoConfig as AlgoConfig
from quark.torch.quantization.config.algo_base import BlockAlgoConfig as BlockAlgoConfig
from quark.torch.quantization.config.algo_base import PreQuantOptConfig as PreQuantOptConfig
from quark.torch.quantization.config.algo_base import RandomTokensConfig as RandomTokensConfig
from quark.torch.quantization.config.algo_base import RoundingConfig as RoundingConfig
from quark.torch.quantization.config.algo_base import present_options as present_options
from quark.torch.quantization.config.algo_training import AutoRoundConfig as AutoRoundConfig
from quark.torch.quantization.config.algo_training import (
    BlockwiseJointTuningConfig as BlockwiseJointTuningConfig,
)
from quark.torch.quantization.config.bounds import Count, Fraction, Natural, NonNegative
from quark.torch.quantization.config.pruning import PruningConfig as PruningConfig
from quark.torch.quantization.config.pruning import SparseGPTConfig as SparseGPTConfig
from quark.torch.quantization.config.pruning import WandaConfig as WandaConfig
from quark.torch.quantization.config.value_types import check_fields, check_options


@dataclass
class SmoothQuantConfig(RandomTokensConfig, PreQuantOptConfig):
    """Options of SmoothQuant (Xiao et al. 2023), which moves outliers into weights.

    Attributes:
        alpha: Migration strength between 0 and 1, equation 4 of the paper.
        scale_clamp_min: Lower bound of the smoothing factors.
        scaling_layers: Groups of layers to scale, as in the documented files. Empty: discovered.
        model_decoder_layers: Name of the list of decoder blocks; used with ``scaling_layers``.
        random_tokens: Sequences of random tokens that are added to the data, for each sequence of
            it, between 0 and 1.
    """

    name: str = "smooth"
    alpha: Fraction = 1
    scale_clamp_min: NonNegative = 1e-3
    scaling_layers: list[dict[str, Any]] = field(default_factory=list)
    model_decoder_layers: str = ""
    random_tokens: Fraction = 0.0


@dataclass
class OnlineRotationConfig:
    """Options of rotations in the forward pass.

    Attributes:
        shared_parallel: No effect: parallel layers share a rotation in any case.
        online_rotation_layers: Full names, or patterns of names (as in ``fnmatch``), of quantized
            layers whose inputs are rotated. ``*`` stands for any characters, alone for all linear
            layers.
        use_input_prescale: Whether these inputs are multiplied by factors before, which move
            outliers into weights.
    """

    shared_parallel: bool = True
    online_rotation_layers: list[str] | None = None
    use_input_prescale: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass
class RotationConfig(PreQuantOptConfig):
    """Options of QuaRot and SpinQuant rotations (Ashkboos et al. 2024; Liu et al. 2024).

    Attributes:
        scaling_layers: Norms and layers of the residual stream, as in the documented files. Empty:
            discovered.
        r1: Whether to rotate the residual stream.
        r2: Whether to rotate values in each head.
        r3: Whether to rotate queries and keys after the rotary embedding.
        r4: Whether to rotate the inputs of down projections in the forward pass.
        rotation_size: Order of the Hadamard matrices; None for the largest that divides the width.
        random_r1: Whether the matrix of ``r1`` has random signs.
        random_r2: Whether the matrices of ``r2`` have random signs.
        backbone: No effect: the structure of the model is discovered.
        model_decoder_layers: Name of the list of decoder blocks; used with ``scaling_layers``.
        v_proj: Name of the value projection in a block; used with ``scaling_layers``.
        o_proj: Name of the output projection in a block; used with ``scaling_layers``.
        self_attn: No effect: the structure of the model is discovered.
        mlp: No effect: the structure of the model is discovered.
        online_r1_rotation: Whether to apply ``r1`` in the forward pass instead of in weights.
        online_config: Options of rotations in the forward pass.
        trainable: Whether to train the rotations on calibration data, as SpinQuant does.
        train_smooth: Whether to train factors between layers together with the rotations.
        smooth_positions: Endings of the names of the modules whose outputs the factors divide, such
            as ``v_proj``. None: all whose outputs can be rescaled.
    """

    scaling_layers: dict[str, list[dict[str, Any]]] | list[Any] = field(default_factory=dict)
    name: str = "rotation"
    r1: bool = True
    r2: bool = False
    r3: bool = False
    r4: bool = False
    rotation_size: Count | None = None
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
            given = present_options(
                self.online_config, OnlineRotationConfig, "option of online_config"
            )
            check_fields(given, OnlineRotationConfig, "online_config")
            self.online_config = OnlineRotationConfig(**given)
        super().__post_init__()


@dataclass
class QuaRotConfig(RotationConfig):
    """Options of all four rotations of QuaRot.

    Attributes:
        optimized_rotation_path: Not supported; must be None.
    """

    name: str = "quarot"
    r2: bool = True
    r3: bool = True
    r4: bool = True
    optimized_rotation_path: str | None = None


@dataclass
class AutoSmoothQuantConfig(RandomTokensConfig):
    """Options of SmoothQuant with a search for the strength of each group of layers.

    Attributes:
        scaling_layers: Groups of layers to scale, as in the documented files. None: discovered.
        model_decoder_layers: Name of the list of decoder blocks; used with ``scaling_layers``.
        compute_scale_loss: Loss of the search: ``MSE`` or ``MAE``.
        random_tokens: Sequences of random tokens that are added to the data, for each sequence of
            it, between 0 and 1.
    """

    name: str = "autosmoothquant"
    scaling_layers: list[dict[str, Any]] | None = None
    model_decoder_layers: str | None = None
    compute_scale_loss: str | None = "MSE"
    random_tokens: Fraction = 0.0


@dataclass
class AWQConfig(RandomTokensConfig):
    """Options of AWQ (Lin et al. 2024): activation-aware scaling and clipping of weights.

    Attributes:
        scaling_layers: Groups of layers to scale, as in the documented files. Empty: discovered.
        model_decoder_layers: Name of the list of decoder blocks; used with ``scaling_layers``.
        random_tokens: Sequences of random tokens that are added to the data, for each sequence of
            it, between 0 and 1.
    """

    name: str = "awq"
    scaling_layers: list[dict[str, Any]] = field(default_factory=list)
    model_decoder_layers: str = ""
    random_tokens: Fraction = 0.0


@dataclass
class CLEConfig(PreQuantOptConfig):
    """Options of cross-layer equalization (Nagel et al. 2019).

    Attributes:
        iterations: Largest number of rounds over all pairs of layers. It ends earlier if no factor
            changes by more than a thousandth.
        absorb_biases: Whether to move high biases into the next layers afterwards (section 4.1.3).
            This needs calibration data.
    """

    name: str = "cle"
    iterations: Count = 50
    absorb_biases: bool = False


@dataclass
class BiasCorrectionConfig(AlgoConfig):
    """Options of bias correction (Nagel et al. 2019, section 4.2). There are none."""

    name: str = "bias_correction"


@dataclass
class SolverConfig(RandomTokensConfig, RoundingConfig):
    """Base class of the options of algorithms that round weights column by column.

    Attributes:
        inside_layer_modules: Names of the layers of a block to round. Empty: all quantized layers.
        model_decoder_layers: Name of the list of decoder blocks. Empty: discovered.
        block_size: Columns per update of the remaining columns.
        desc_act: Whether columns are rounded in descending order of their activations.
        static_groups: Whether groups are formed in the original order of columns.
        choose_damping: Whether the damping of each layer is chosen on data that is held back; the
            damping of the algorithm is then the weakest.
        random_tokens: Sequences of random tokens that are added to the data, for each sequence of
            it, between 0 and 1.

    Raises:
        ValueError: ``desc_act`` is set without ``static_groups``.
    """

    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""
    block_size: Count = 128
    desc_act: bool = True
    static_groups: bool = True
    choose_damping: bool = False
    random_tokens: Fraction = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.desc_act and not self.static_groups:
            raise ValueError(
                f"{type(self).__name__}: desc_act=True needs static_groups=True, since the order "
                "of columns is not stored. Set static_groups=True or desc_act=False."
            )


@dataclass
class GPTQConfig(SolverConfig):
    """Options of GPTQ (Frantar et al. 2023).

    Attributes:
        damp_percent: Damping of the Hessian, as a fraction of its mean diagonal.
        true_sequential: Whether each layer of a block sees the rounded layers before it.
    """

    name: str = "gptq"
    damp_percent: Fraction = 0.01
    true_sequential: bool = False


@dataclass
class GPTAQConfig(GPTQConfig):
    """Options of GPTAQ (Li et al. 2025): GPTQ that corrects for the inputs of the float model.

    Attributes:
        alpha: Fraction of the correction to apply, between 0 and 1.
    """

    name: str = "gptaq"
    alpha: Fraction = 0.25


@dataclass
class QronosConfig(SolverConfig):
    """Options of Qronos (Zhang et al. 2025).

    Attributes:
        alpha: Not supported; must be the default. The damping is fixed.
        beta: Not supported; must be the default. The damping is fixed.
    """

    name: str = "qronos"
    alpha: float = 1e-3
    beta: float = 1e4


@dataclass
class YaqaConfig(SolverConfig):
    """Options of YAQA (Tseng et al. 2025): rounding with Hessians of inputs and outputs.

    Attributes:
        damp_percent: Damping of the input Hessian, as a fraction of its mean diagonal.
        output_damp_percent: Damping of the output Hessian, as a fraction of its mean diagonal.
    """

    name: str = "yaqa"
    damp_percent: Fraction = 0.01
    output_damp_percent: Fraction = 0.3


@dataclass
class SVDQuantConfig(AlgoConfig):
    """Options of SVDQuant (Li et al. 2024): a low-rank branch in float beside rounded weights.

    Attributes:
        svd_rank: Rank of the branch.
        smooth_alpha: Strength of smoothing between 0 and 1, without a search.
        search_alpha: Whether to search the strength for each tensor that layers read.
        alpha_candidates: Strengths of the search beside no smoothing. None: 0.1, 0.3, ... 0.9.
        alpha_search_max_samples: Size of the sample that judges the search, in units of 128 tokens.
        exclude_patterns: Full names of layers that get no branch; ``*`` stands for any characters.
        min_layer_size: Smallest number of inputs and of outputs of layers that get a branch.
        use_gptq: Whether GPTQ follows, with the next options, and rounds what is left.
        gptq_n_bits: Not supported; must be the default. The scheme chooses the format.
        gptq_symmetric: Not supported; must be the default. The scheme chooses the format.
        gptq_group_size: Not supported; must be the default. The scheme chooses the format.
        gptq_blocksize: ``block_size`` of GPTQ.
        gptq_percdamp: ``damp_percent`` of GPTQ.
        gptq_actorder: ``desc_act`` of GPTQ.
        low_rank_layers: Full names of the layers that get a branch. None: all that the other
            options select.
    """

    name: str = "svdquant"
    svd_rank: Count = 32
    smooth_alpha: Fraction = 0.5
    search_alpha: bool = True
    alpha_candidates: list[Fraction] | None = None
    alpha_search_max_samples: Count = 8
    exclude_patterns: list[str] = field(default_factory=list)
    min_layer_size: Natural = 256
    use_gptq: bool = False
    gptq_n_bits: int = 4
    gptq_symmetric: bool = True
    gptq_group_size: int = -1
    gptq_blocksize: Count = 128
    gptq_percdamp: Fraction = 0.01
    gptq_actorder: bool = False
    low_rank_layers: list[str] | None = None

    def steps(self) -> list[AlgoConfig]:
        """Return these options, and those of GPTQ if it follows."""
        if not self.use_gptq:
            return [self]
        gptq = GPTQConfig(
            block_size=self.gptq_blocksize,
            damp_percent=self.gptq_percdamp,
            desc_act=self.gptq_actorder,
        )
        return [self, gptq]


ALGO_CONFIGS: dict[str, type[AlgoConfig]] = {
    cls.name: cls
    for cls in (
        SmoothQuantConfig,
        RotationConfig,
        QuaRotConfig,
        AutoSmoothQuantConfig,
        AWQConfig,
        CLEConfig,
        BiasCorrectionConfig,
        SparseGPTConfig,
        WandaConfig,
        GPTQConfig,
        GPTAQConfig,
        QronosConfig,
        YaqaConfig,
        AutoRoundConfig,
        BlockwiseJointTuningConfig,
        SVDQuantConfig,
    )
}
