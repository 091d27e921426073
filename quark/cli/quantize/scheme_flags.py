"""The flags of ``quark quantize`` that say how layers, the cache and attention are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from quark.cli.options import complete, in_words, panel
from quark.cli.schemes import listed_schemes
from quark.torch.quantization.config.part_kinds import PARTS
from quark.torch.quantization.config.recipes import RECIPES

_scheme = panel("Scheme")


@dataclass(frozen=True, kw_only=True)
class SchemeFlags:
    """The layers to quantize, and their schemes."""

    quant_scheme: Annotated[
        str | None,
        _scheme(
            metavar="NAME",
            autocompletion=complete(partial(listed_schemes, "quant_scheme")),
            help="Scheme of all layers ('quark schemes' lists them).",
        ),
    ] = None
    recipe: Annotated[
        str | None,
        _scheme(
            metavar="NAME",
            autocompletion=complete(RECIPES.keys),
            help="Recipe instead of a scheme: a scheme with its best algorithms "
            f"({', '.join(RECIPES)}; 'quark recipes' describes them).",
        ),
    ] = None
    config: Annotated[
        Path | None,
        _scheme(
            metavar="FILE",
            help="Config as JSON instead of a scheme, as Config.to_dict returns it.",
        ),
    ] = None
    group_size: Annotated[
        int | None,
        _scheme(
            metavar="N",
            min=-1,
            help="Group size, for schemes that do not fix it (default 128; -1 = one group per "
            "row).",
        ),
    ] = None
    group_size_per_layer: Annotated[
        list[str] | None,
        _scheme(
            metavar="PATTERN N",
            help="Group size of the layers that match a name pattern; repeatable.",
        ),
    ] = None
    scale_format: Annotated[
        Literal["e4m3", "float32"] | None,
        _scheme(
            metavar="TYPE", help="Format of the scales of fp4 and fp6 groups: e4m3 or float32."
        ),
    ] = None
    scale_calculation_mode: Annotated[
        Literal["even", "floor", "ceil"] | None,
        _scheme(metavar="MODE", help="Rounding of shared exponents (MX): even, floor or ceil."),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        _scheme(
            metavar="NAME",
            autocompletion=complete(partial(listed_schemes, "kv_cache_dtype")),
            help="Scheme of the key-value cache, such as fp8 ('quark schemes' lists them). "
            "Default: the cache stays in float. Alias: --kv_cache_quant_scheme.",
        ),
    ] = None
    min_kv_scale: Annotated[
        float | None, _scheme(metavar="X", min=0.0, help="Lower bound of the scales of the cache.")
    ] = None
    kv_cache_post_rope: Annotated[
        bool, _scheme(help="Quantize cached keys after the rotary embedding, not before.")
    ] = False
    attention_scheme: Annotated[
        Literal[
            "fp8",
            "qkv_fp8",
            "qkv_fp8_per_head",
            "qkv_int8_per_head",
            "qkv_int4_per_head",
            "qkv_fp4_per_head",
        ]
        | None,
        _scheme(
            metavar="NAME",
            help="Scheme of attention: fp8 (queries and probabilities), or qkv_fp8 and so on "
            "(queries, keys and values after rotary embedding). Default: float. "
            "Alias: --attention_dtype.",
        ),
    ] = None
    fp8_attention_quant: Annotated[
        bool, typer.Option(help="The same as --attention_scheme fp8.", hidden=True)
    ] = False
    layer_quant_scheme: Annotated[
        list[str] | None,
        _scheme(
            metavar="PATTERN SCHEME",
            help="Scheme of layers that match a name pattern; repeatable, the first match counts.",
        ),
    ] = None
    exclude_layers: Annotated[
        list[str] | None,
        _scheme(
            metavar="PATTERN …",
            help="Name patterns of layers to leave in float (default: lm_head, the output head, "
            "with the parts of --include_parts; without a value: none).",
        ),
    ] = None
    include_parts: Annotated[
        list[str] | None,
        _scheme(
            metavar="KIND …",
            help="Kinds of parts to quantize that stay in float by default: "
            f"{in_words(PARTS)} (tower: of images or audio).",
        ),
    ] = None
    weight_matrix_merge: Annotated[
        bool,
        _scheme(
            help="Share per-tensor scales among layers that inference software fuses (query, key, "
            "value; gate, up). Schemes with two levels of scales always do.",
        ),
    ] = False
