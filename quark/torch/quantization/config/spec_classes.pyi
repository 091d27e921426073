"""The documented helper classes. ``scripts/spec_stub.py`` writes this file."""

from dataclasses import dataclass

from quark.torch.quantization.config.spec_bases import DataTypeSpec as DataTypeSpec
from quark.torch.quantization.config.spec_bases import ProgressiveSpec as ProgressiveSpec
from quark.torch.quantization.config.spec_bases import ScaleQuantSpec as ScaleQuantSpec
from quark.torch.quantization.config.spec_bases import TwoStageSpec as TwoStageSpec
from quark.torch.quantization.config.type import Dtype, RoundType, ScaleType, ZeroPointType

SPEC_CLASSES: dict[str, type[DataTypeSpec]]

@dataclass
class Int4PerTensorSpec(DataTypeSpec):
    """Quantization to int4 per_tensor."""

    observer_method: str | None = "min_max"
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class Int8PerTensorSpec(DataTypeSpec):
    """Quantization to int8 per_tensor."""

    observer_method: str | None = "min_max"
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class Uint4PerTensorSpec(DataTypeSpec):
    """Quantization to uint4 per_tensor."""

    observer_method: str | None = "min_max"
    symmetric: bool | None = False
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class Uint8PerTensorSpec(DataTypeSpec):
    """Quantization to uint8 per_tensor."""

    observer_method: str | None = "min_max"
    symmetric: bool | None = False
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class Int3PerChannelSpec(DataTypeSpec):
    """Quantization to int3 per_channel."""

    ch_axis: int
    symmetric: bool | None = False
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class Int4PerChannelSpec(DataTypeSpec):
    """Quantization to int4 per_channel."""

    ch_axis: int
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class Int8PerChannelSpec(DataTypeSpec):
    """Quantization to int8 per_channel."""

    ch_axis: int
    symmetric: bool | None = False
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class Uint4PerChannelSpec(DataTypeSpec):
    """Quantization to uint4 per_channel."""

    ch_axis: int
    symmetric: bool | None = False
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False
    zero_point_type: ZeroPointType | str = "int32"

@dataclass
class Uint8PerChannelSpec(DataTypeSpec):
    """Quantization to uint8 per_channel."""

    ch_axis: int
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class Int2PerGroupSpec(DataTypeSpec):
    """Quantization to int2 per_group."""

    ch_axis: int
    group_size: int
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class Int3PerGroupSpec(DataTypeSpec):
    """Quantization to int3 per_group."""

    ch_axis: int
    group_size: int
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class Int4PerGroupSpec(DataTypeSpec):
    """Quantization to int4 per_group."""

    ch_axis: int
    group_size: int
    symmetric: bool | None = True
    is_dynamic: bool | None = False
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"

@dataclass
class Int8PerGroupSpec(DataTypeSpec):
    """Quantization to int8 per_group."""

    ch_axis: int
    group_size: int
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class Uint4PerGroupSpec(DataTypeSpec):
    """Quantization to uint4 per_group."""

    ch_axis: int
    group_size: int
    symmetric: bool | None = False
    is_dynamic: bool | None = False
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"

@dataclass
class Uint8PerGroupSpec(DataTypeSpec):
    """Quantization to uint8 per_group."""

    ch_axis: int
    group_size: int
    symmetric: bool | None = False
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class FP8E4M3PerTensorSpec(DataTypeSpec):
    """Quantization to fp8_e4m3 per_tensor."""

    observer_method: str | None = "min_max"
    scale_type: ScaleType | str | None = None
    is_dynamic: bool | None = False
    symmetric: bool | None = True
    round_method: RoundType | str | None = "half_even"

@dataclass
class FP8E5M2PerTensorSpec(DataTypeSpec):
    """Quantization to fp8_e5m2 per_tensor."""

    observer_method: str | None = "min_max"
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class FP8E4M3PerChannelSpec(DataTypeSpec):
    """Quantization to fp8_e4m3 per_channel."""

    ch_axis: int
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class FP8E5M2PerChannelSpec(DataTypeSpec):
    """Quantization to fp8_e5m2 per_channel."""

    ch_axis: int
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False

@dataclass
class FP8E5M3PerTensorSpec(DataTypeSpec):
    """Quantization to fp8_e5m3 per_tensor."""

    observer_method: str | None = "min_max"
    scale_type: ScaleType | str | None = None
    is_dynamic: bool | None = False

@dataclass
class FP8E4M3PerGroupSpec(DataTypeSpec):
    """Quantization to fp8_e4m3 per_group."""

    ch_axis: int
    group_size: int
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True
    scale_type: ScaleType | str | None = "float"
    symmetric: bool | None = None
    round_method: RoundType | str | None = "half_even"

@dataclass
class FP8E5M2PerGroupSpec(DataTypeSpec):
    """Quantization to fp8_e5m2 per_group."""

    ch_axis: int
    group_size: int
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True
    scale_type: ScaleType | str | None = "float"
    symmetric: bool | None = None
    round_method: RoundType | str | None = "half_even"

@dataclass
class FP6E2M3PerGroupSpec(DataTypeSpec):
    """Quantization to fp6_e2m3 per_group."""

    ch_axis: int
    group_size: int
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True

@dataclass
class FP6E3M2PerGroupSpec(DataTypeSpec):
    """Quantization to fp6_e3m2 per_group."""

    ch_axis: int
    group_size: int
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True

@dataclass
class FP4PerGroupSpec(DataTypeSpec):
    """Quantization to fp4 per_group."""

    ch_axis: int
    group_size: int
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True
    scale_type: ScaleType | str | None = "float"

@dataclass
class AmdFP4Spec(DataTypeSpec):
    """Quantization to fp4 per_group."""

    ch_axis: int
    group_size: int
    is_dynamic: bool | None = True

@dataclass
class OCP_MXFP8E4M3Spec(DataTypeSpec):
    """Quantization to fp8_e4m3 per_group."""

    ch_axis: int
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"

@dataclass
class OCP_MXFP8E5M2Spec(DataTypeSpec):
    """Quantization to fp8_e5m2 per_group."""

    ch_axis: int
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"

@dataclass
class OCP_MXFP6E3M2Spec(DataTypeSpec):
    """Quantization to fp6_e3m2 per_group."""

    ch_axis: int
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"

@dataclass
class OCP_MXFP6E2M3Spec(DataTypeSpec):
    """Quantization to fp6_e2m3 per_group."""

    ch_axis: int
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"

@dataclass
class OCP_MXFP4Spec(DataTypeSpec):
    """Quantization to fp4 per_group."""

    ch_axis: int
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"

@dataclass
class OCP_MXFP4DiffsSpec(DataTypeSpec):
    """Quantization to fp4 per_group."""

    ch_axis: int
    is_dynamic: bool | None = False
    scale_calculation_mode: str | None = "even"

@dataclass
class OCP_MXINT8Spec(DataTypeSpec):
    """Quantization to mx."""

    ch_axis: int
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"

@dataclass
class MXSpec(DataTypeSpec):
    """Quantization to mx."""

    mx_element_dtype: Dtype | str = "fp8_e4m3"
    ch_axis: int = -1
    block_size: int = 32
    is_dynamic: bool | None = True

@dataclass
class MX6Spec(DataTypeSpec):
    """Quantization to mx6."""

    ch_axis: int
    block_size: int
    scale_calculation_mode: str | None = "even"
    is_dynamic: bool | None = True

@dataclass
class MX9Spec(DataTypeSpec):
    """Quantization to mx9."""

    ch_axis: int
    block_size: int
    scale_calculation_mode: str | None = "even"
    is_dynamic: bool | None = True

@dataclass
class BFP16Spec(DataTypeSpec):
    """Quantization to bfp16."""

    ch_axis: int
    scale_calculation_mode: str | None = "even"
    is_dynamic: bool | None = True

@dataclass
class Float16Spec(DataTypeSpec):
    """Quantization to float16."""

@dataclass
class Bfloat16Spec(DataTypeSpec):
    """Quantization to bfloat16."""
