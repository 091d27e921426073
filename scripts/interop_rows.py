"""Which schemes are opened by which client in which layout, and what has to come of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from interop_alignment import Alignment

from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.config.spec import QuantizationSpec


class Expected(NamedTuple):
    """Bounds of differences between log-probabilities, and of the change of perplexity in percent.

    Attributes:
        largest: Bound for all tokens.
        median: Bound for the median over the tokens.
        perplexity: Bound for the perplexity.
        beside: Bounds where each layer is given what the client's was given, if that is compared.
        may_refuse: Whether the client may lack a kernel, and say so.
    """

    largest: float = float("inf")
    median: float = float("inf")
    perplexity: float = float("inf")
    beside: Alignment | None = None
    may_refuse: bool = False


class Row(NamedTuple):
    """A scheme, written in a layout, opened by a client."""

    client: str
    layout: str
    scheme: str
    expected: Expected


SUMS = Alignment(aligned=1e-5, layers=1e-5, between=1e-4)  # sums in another order, no more
SAME = Expected(largest=0)
EXACT = Expected(largest=1e-4)  # sums in another order: the float model differs by half of it
TIES = Expected(median=1e-5, perplexity=0.5)
CLOSE = Expected(perplexity=0.5)
ALIGNED = EXACT._replace(beside=SUMS)
ALIGNED_TIES = TIES._replace(beside=SUMS)
ALIGNED_CLOSE = Expected(perplexity=1, beside=SUMS)
# vLLM multiplies by reciprocals for NVFP4: values and scales beside a tie go either way in a layer
ALIGNED_NVFP4 = TIES._replace(beside=Alignment(aligned=1e-4, layers=1e-2, between=1e-2))
# fp8 caches of vLLM take AVX-512. A key beside a tie goes either way; all later tokens read it.
ALIGNED_CACHE = TIES._replace(beside=SUMS._replace(between=1e-2), may_refuse=True)
LACKS = Expected(perplexity=2, may_refuse=True)  # in bfloat16, or not at all
OTHER_INPUTS = Expected(perplexity=3)  # it rounds inputs that stay in float here, or does not

CACHE, ATTENTION = " + fp8 cache", " + fp8 attention"
ROTATED = " + rotated inputs"
BLOCKS = "fp8 in blocks of 128"
CT = "compressed-tensors"
AS_IT_IS = "vllm as it is"
W8A8 = "w_int8_per_channel_a_int8_per_tensor_sym"
INT8_PER_TOKEN = ("ptpc_int8", "w_int8_a_int8_per_token_dynamic")
# What vLLM knows and no preset has.
OFFSETS, STATIC = "int8 per channel, inputs with offsets", "fp8 per channel, static inputs"
DYNAMIC = "fp8, dynamic inputs"
UNNAMED = {
    OFFSETS: QuantizationConfig(
        weight=scheme(W8A8).weight,
        input_tensors=replace(scheme("int8").input_tensors, symmetric=False),
    ),
    STATIC: QuantizationConfig(
        weight=scheme("ptpc_fp8").weight, input_tensors=scheme("fp8").input_tensors
    ),
    DYNAMIC: QuantizationConfig(
        weight=scheme("fp8").weight,
        input_tensors=replace(scheme("fp8").input_tensors, is_dynamic=True),
    ),
    BLOCKS: QuantizationConfig(
        weight=QuantizationSpec(
            "fp8_e4m3", qscheme="per_block", block_size=(128, 128), is_dynamic=False
        ),
        input_tensors=QuantizationSpec(
            "fp8_e4m3", qscheme="per_group", ch_axis=-1, group_size=128, is_dynamic=True
        ),
    ),
}
ALL = tuple(name for name in scheme_names() if not name.startswith("w_"))
BY_AMD = (
    *("int8", W8A8, "ptpc_int8", "int8_wo", "int8_wo_32", "int8_wo_128", "int4_wa_32"),
    *("int4_wo_per_channel", "uint4_wo_per_channel", "fp8", "fp8_wo", "ptpc_fp8", "mxfp4"),
    *("mxfp4_weight_only", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_mxfp6_e2m3", "mxfp4_fp8"),
    *("amdfp4", "amdfp4_g32"),
)
# It has no reader for these layouts.
NOT_BY_AMD = (
    *("nvfp4", "nvfp4_weight_only", "fp4_block16_scale_e4m3", "amdfp4_global16", "int4_fp8"),
    *("mxfp8", "mx6", "mx9", "bfp16", "bfloat16", "float16", "int3_wo_per_channel", "int3_wo_32"),
    "int2_wo_32",
)
GROUPS_OF_4 = tuple(f"{kind}_wo_{size}" for kind in ("int4", "uint4") for size in (32, 64, 128))
MX_WEIGHTS = ("mxfp4_weight_only", "w_mxfp6_e3m2", "w_mxfp6_e2m3", "w_mxfp8")
MX_INPUTS = ("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_mxfp6_e2m3", "mxfp4_fp8")
SIGNED = "int4_wo_signed_128"
GGUF = (SIGNED, "int4_wo_32", "int4_wo_128", "int4_wo_per_channel", "int8_wo", "int8_wo_32")
GGUF_OFFSETS = ("uint4_wo_32", "uint4_wo_128")
GGUF_BLOCKS = ("q4_0", "q5_0", "q8_0", "q3_k", "q6_k", "iq4_nl")
GGUF_FLOATS = ("mxfp4_weight_only", "nvfp4_weight_only")
GGUF_MINIMA = ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k")
TORCHAO = ("int4_wo_per_channel", "int3_wo_32", "int2_wo_32", "int5_wo_64", "int7_wo_128")
UNKNOWN_TO_VLLM = ("int8_wo", "fp8_wo", "int3_wo_128", "int4_wo_per_channel", "mx9", "int4_fp8")
ONNX = (SIGNED, "int8_wo", "int8_wo_128", "int4_wo_32", "uint4_wo_128", "int3_wo_128", "fp8_wo")

TABLE: tuple[tuple[str, str, Expected, tuple[str, ...]], ...] = (
    ("transformers", "quark", SAME, (*ALL, W8A8, "fp8" + CACHE)),
    ("transformers", "fp8", OTHER_INPUTS, (BLOCKS,)),  # without a GPU it leaves inputs in float
    ("transformers", "mxfp8", CLOSE, ("mxfp8",)),
    ("transformers", "gguf", SAME, GGUF),
    ("transformers", "gguf", CLOSE, GGUF_OFFSETS),  # offsets are rounded to float16
    ("transformers", "gguf", SAME, GGUF_BLOCKS),
    ("transformers", "gguf", CLOSE, GGUF_MINIMA),  # zero points are rounded to float32
    ("llama.cpp", "gguf", CLOSE, (*GGUF, *GGUF_OFFSETS)),  # it rounds inputs to 8 bits
    ("llama.cpp", "gguf", CLOSE, (*GGUF_BLOCKS, *GGUF_MINIMA, *GGUF_FLOATS)),
    (
        "mlx",
        "mlx",
        EXACT,
        (SIGNED, *GROUPS_OF_4, "int8_wo_128", "int3_wo_32", "int5_wo_64", "int6_wo_128"),
    ),
    (CT, CT, SAME, (SIGNED, "fp8", "int8_wo", "int8_wo_128", "fp8_wo", *GROUPS_OF_4[:3])),
    (CT, CT, TIES, ("int8", W8A8)),  # it divides by scales: values beside a tie may go either way
    (
        CT,
        CT,
        SAME,
        ("int4_wo_per_channel", "ptpc_fp8", "int5_wo_128", "int6_wo_128", "int7_wo_128"),
    ),
    (CT, CT, SAME, ("int2_wo_128", "int3_wo_128")),
    (CT, CT, CLOSE, ("w_int4_per_group_a_int8_per_token_dynamic",)),
    (CT, CT, SAME, ("int4_wo_128" + ATTENTION, "fp8" + ATTENTION, "int8_wo" + CACHE)),
    (CT, CT, LACKS, ("mxfp6_e2m3", "mxfp8", "w_mxfp8")),
    (CT, CT, CLOSE, ("ptpc_int8",)),  # the largest value of a token is a tie
    (CT, CT, LACKS, ("uint4_wo_128", "mxfp4_weight_only", "nvfp4_weight_only", "nvfp4")),
    (
        "torchao",
        "torchao",
        EXACT,
        (SIGNED, "int8_wo", "int8_wo_128", "fp8_wo", *GROUPS_OF_4, *TORCHAO),
    ),
    ("torchao", "torchao", CLOSE, ("ptpc_int8",)),  # the largest value of a token is a tie
    ("torchao", "torchao", LACKS, ("ptpc_fp8",)),  # its products take a GPU
    ("gptqmodel", "awq", CLOSE, (SIGNED, *GROUPS_OF_4)),
    (
        "gptqmodel",
        "gptq",
        CLOSE,
        (SIGNED, *GROUPS_OF_4, "int3_wo_128", "int2_wo_32", "int8_wo_128"),
    ),
    ("gptqmodel", "gptq", CLOSE, ("int8_wo",)),
    ("gptqmodel", "gptq", LACKS, ("int4_wo_per_channel",)),
    ("modelopt", "modelopt", EXACT, ("nvfp4_weight_only",)),
    ("modelopt", "modelopt", TIES, ("fp8",)),
    ("lm-eval", "quark", EXACT, ("int8", "fp8", "int4_wo_128", "int3_wo_128")),
    ("lm-eval", "quark", TIES, ("mxfp4",)),
    ("amd-quark", "quark", SAME, (SIGNED, *BY_AMD, *GROUPS_OF_4)),
    ("amd-quark", "quark", LACKS, NOT_BY_AMD),
    ("vllm", "float", ALIGNED, ("float",)),
    ("vllm", "quark", ALIGNED, (SIGNED, *GROUPS_OF_4, *MX_WEIGHTS)),
    ("vllm", "quark", ALIGNED_TIES, ("int8", W8A8, "fp8", "ptpc_fp8", *MX_INPUTS)),
    ("vllm", "quark", ALIGNED_NVFP4, ("nvfp4",)),
    ("vllm", "quark", ALIGNED_CLOSE, INT8_PER_TOKEN),  # the largest value of a token is a tie
    ("vllm", "quark", ALIGNED_TIES, (OFFSETS, STATIC)),
    ("vllm", "quark", ALIGNED_CACHE, ("int8" + CACHE, "fp8" + CACHE)),
    ("vllm", "quark", ALIGNED_CLOSE, (DYNAMIC,)),  # the range of a prompt differs in its last bit
    ("vllm", "quark", CLOSE, ("mxfp8",)),  # it leaves the inputs in float
    ("vllm", "quark", LACKS, (*UNKNOWN_TO_VLLM, "nvfp4_weight_only")),
    ("vllm", "awq", ALIGNED, (SIGNED, *GROUPS_OF_4)),
    ("vllm", "gptq", ALIGNED, (SIGNED, *GROUPS_OF_4[:3], "int4_wo_per_channel")),
    ("vllm", "gptq", LACKS, ("uint4_wo_128", "int8_wo_128")),
    ("vllm", CT, ALIGNED, (SIGNED, *GROUPS_OF_4, "int4_wo_per_channel")),
    ("vllm", CT, ALIGNED, ("int8_wo", "int8_wo_128")),
    ("vllm", CT, ALIGNED_TIES, ("int8", W8A8, "fp8", "ptpc_fp8", "mxfp4")),
    ("vllm", CT, ALIGNED_NVFP4, ("nvfp4",)),
    ("vllm", CT, ALIGNED_CLOSE, INT8_PER_TOKEN),
    ("vllm", CT, ALIGNED_CACHE, ("int8" + CACHE, "fp8" + CACHE)),
    ("vllm", CT, OTHER_INPUTS, ("mxfp4_weight_only",)),
    ("vllm", CT, EXACT, tuple(f"int{bits}_wo_128" for bits in (2, 3, 5, 6, 7))),
    ("vllm", CT, EXACT, ("int4_wo_128" + ROTATED,)),
    ("vllm", CT, TIES, (W8A8 + ROTATED, "mxfp4" + ROTATED)),
    ("vllm", CT, LACKS, ("nvfp4_weight_only", "fp8_wo", "mxfp8")),
    ("vllm", CT, LACKS, ("w_int4_per_group_a_int8_per_token_dynamic",)),
    ("vllm", "modelopt", TIES, ("fp8", "nvfp4")),
    ("vllm", "modelopt", CLOSE, ("mxfp8",)),  # it leaves the inputs in float
    ("vllm", "modelopt", LACKS, ("nvfp4_weight_only",)),
    ("vllm", "quark", ALIGNED_TIES, (BLOCKS,)),
    ("vllm", "fp8", ALIGNED_TIES, (BLOCKS,)),
    ("vllm", "fp8", ALIGNED_TIES, ("fp8",)),
    ("vllm", "fp8", ALIGNED_CACHE, ("fp8" + CACHE,)),
    (AS_IT_IS, "quark", LACKS, ("int8", W8A8, "ptpc_int8", "ptpc_fp8", "fp8", *GROUPS_OF_4)),
    (AS_IT_IS, "quark", LACKS, ("mxfp4", "nvfp4", "mxfp8")),
    (AS_IT_IS, "awq", LACKS, (SIGNED, "int4_wo_128", "uint4_wo_128")),
    (AS_IT_IS, "gptq", LACKS, (SIGNED, "int4_wo_128")),
    (AS_IT_IS, CT, LACKS, (SIGNED, "int8", "ptpc_fp8", "fp8", "int4_wo_128", "uint4_wo_128")),
    (AS_IT_IS, "fp8", LACKS, ("fp8",)),
    ("vllm", CT, LACKS, ("int4_wo_128" + ATTENTION,)),  # it rounds queries on some GPUs alone
    ("onnxruntime", "onnx", EXACT, (*ONNX, "mxfp4_weight_only", "nvfp4_weight_only")),
    ("onnxruntime", "MatMulNBits", EXACT, (SIGNED, "int4_wo_32", "uint4_wo_128", "int8_wo_128")),
    ("onnxruntime", "onnx", TIES, ("int8", W8A8, "fp8", "ptpc_fp8")),
    ("onnxruntime", "onnx", CLOSE, ("ptpc_int8",)),  # the largest value of a token is a tie
)


def rows(clients: Collection[str], schemes: Collection[str]) -> list[Row]:
    """Return the rows of these clients and patterns of schemes; of all, where none is given."""
    return [
        Row(client, layout, scheme, expected)
        for client, layout, expected, names in TABLE
        for scheme in names
        if (not clients or client.partition(" ")[0] in clients)
        and (not schemes or any(fnmatchcase(scheme, pattern) for pattern in schemes))
    ]
