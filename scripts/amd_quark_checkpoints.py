"""Checkpoints of AMD Quark 0.13 in every scheme, for ``tests/interop/test_amd_quark.py``.

    build/interop/amd-quark/bin/python scripts/amd_quark_checkpoints.py tests/data/amd_quark.tar.xz

The Python is one that has AMD Quark instead of this package (``scripts/interop.py`` makes it). A
small random Llama is quantized in each scheme, and its logits are computed before it is exported.
What packed codes cannot be exported is exported as values. ``index.json`` holds which logits are
those of a case, and the errors of schemes that cannot be exported at all.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LLAMA = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 32}
RAGGED = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 3}
MODELS = {
    "llama": ("llama", LLAMA),
    "wide": ("llama", {**LLAMA, "intermediate_size": 64}),
    "two layers": ("llama", {**LLAMA, "num_hidden_layers": 2}),
    "ragged": ("llama", {**LLAMA, **RAGGED}),
    "biased": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {**LLAMA, "tie_word_embeddings": True}),
    "experts": ("mixtral", {**LLAMA, **EXPERTS}),
}
GROUP = {"ch_axis": -1, "group_size": 32}
HEAD = ("lm_head",)


@dataclass
class Case:
    """A scheme: a function that makes its configuration, the model, and options of the export."""

    config: Callable[[], Any]
    model: str = "llama"
    dtype: torch.dtype = torch.float32
    export: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {}
quark: Any = import_module("quark.torch")
configs: Any = import_module("quark.torch.quantization.config.config")
types: Any = import_module("quark.torch.quantization.config.type")
observers: Any = import_module("quark.torch.quantization.observer.observer")


def helper(name: str, **fields: Any) -> Any:
    """Return the specification of a helper class, or of two."""
    return getattr(configs, f"{name}Spec")(**fields).to_quantization_spec()


def stages(kind: str, first: Any, second: Any) -> Any:
    """Return the specification of two stages."""
    return getattr(configs, f"{kind}Spec")(first, second).to_quantization_spec()


def raw(dtype: str, qscheme: str | None, observer: str | None, **fields: Any) -> Any:
    """Return a specification without a helper class."""
    enums = {
        "zero_point_type": types.ZeroPointType,
        "scale_type": types.ScaleType,
        "mx_element_dtype": types.Dtype,
    }  # names -> members
    fields = {k: enums[k][v] if k in enums else v for k, v in fields.items()}
    if qscheme is not None:
        fields |= {"qscheme": types.QSchemeType[qscheme]}
        fields |= {"round_method": types.RoundType.half_even}
    cls = None if observer is None else getattr(observers, observer)
    fields = {"is_dynamic": False, **fields}
    return configs.QTensorConfig(dtype=types.Dtype[dtype], observer_cls=cls, **fields)


def integers(dtype: str, qscheme: str, symmetric: bool, **fields: Any) -> Any:
    """Return a specification of integers with a float scale."""
    where = {"per_channel": {"ch_axis": 0}, "per_group": GROUP}.get(qscheme, {})
    observer = "".join(part.capitalize() for part in qscheme.split("_")) + "MinMaxObserver"
    fields = {"scale_type": "float", "symmetric": symmetric, **where, **fields}
    return raw(dtype, qscheme, observer, **fields)


def config(
    weight: Any = None,
    inputs: Any = None,
    outputs: Any = None,
    bias: Any = None,
    exclude: tuple[str, ...] = HEAD,
    **rest: Any,
) -> Any:
    """Return the configuration of all layers."""
    layer = configs.QLayerConfig(
        weight=weight, input_tensors=inputs, output_tensors=outputs, bias=bias
    )
    return configs.QConfig(global_quant_config=layer, exclude=list(exclude), **rest)


def template(
    scheme: str, model: str = "llama", exclude: tuple[str, ...] = HEAD, **rest: Any
) -> Any:
    """Return the configuration of a named scheme."""
    return quark.LLMTemplate.get(model).get_config(
        scheme=scheme, exclude_layers=list(exclude), **rest
    )


def add(name: str, make: Callable[[], Any], *rest: Any, **export: Any) -> None:
    """Add a case."""
    CASES[name] = Case(make, *rest, export=export)


def int8() -> Any:
    return helper("Int8PerChannel", ch_axis=0, symmetric=True)


def fp8(**fields: Any) -> Any:
    return helper("FP8E4M3PerTensor", **fields)


def fp4(is_dynamic: bool, **fields: Any) -> Any:
    return helper("FP4PerGroup", ch_axis=-1, group_size=16, is_dynamic=is_dynamic, **fields)


def nvfp4(is_dynamic: bool) -> Any:
    return stages("ScaleQuant", fp4(is_dynamic), fp8())


def add_named() -> None:
    """Add the named schemes; those in groups of 128 differ from others only in that number."""
    for name in quark.LLMTemplate.get_supported_schemes():
        if "128" not in name:
            model = "wide" if "64" in name else "llama"
            add(f"scheme_{name}", lambda name=name: template(name), model)
    for name in ("fp8", "int8", "int4_wo_32"):
        add(f"scheme_{name}_cache_fp8", lambda name=name: template(name, kv_cache_scheme="fp8"))
    attention = {"kv_cache_scheme": "fp8", "attention_scheme": "fp8"}
    add("scheme_fp8_attention_fp8", lambda: template("fp8", **attention))
    exclude = (*HEAD, "*gate")
    for name in ("int8", "fp8", "uint4_wo_32", "mxfp4"):
        add(f"experts_{name}", lambda name=name: template(name, "mixtral", exclude), "experts")
    for dtype, name in product((torch.bfloat16, torch.float16), ("int8", "uint4_wo_32", "nvfp4")):
        add(f"{str(dtype)[6:]}_{name}", lambda name=name: template(name), "llama", dtype)


def add_integers() -> None:
    """Add integer weights."""
    for bits, qscheme, symmetric in product(
        ("int2", "uint2", "int3", "int4", "uint4", "int8", "uint8", "int16"),
        ("per_tensor", "per_channel", "per_group"),
        (True, False),
    ):
        name = f"w_{bits}_{qscheme}_{'symmetric' if symmetric else 'asymmetric'}"
        add(name, lambda a=(bits, qscheme, symmetric): config(integers(*a)))
    zeros = {"zero_point_type": "float32"}
    add("w_uint4_float_zeros", lambda: config(integers("uint4", "per_group", False, **zeros)))
    for scale in ("float16", "bfloat16"):
        fields = {"scale_type": scale}
        add(
            f"w_int4_scale_{scale}",
            lambda f=fields: config(integers("int4", "per_group", True, **f)),
        )
    by_rows = {"ch_axis": 0, "group_size": 16}
    add("w_int4_groups_of_rows", lambda: config(integers("int4", "per_group", True, **by_rows)))
    histogram = {"observer_method": "histogram"}
    add("w_int8_histogram", lambda: config(helper("Int8PerTensor", **histogram)))
    add("w_int4_ragged", lambda: config(integers("int4", "per_channel", True)), "ragged")
    eight = {"group_size": 8}
    add("w_uint2_ragged", lambda: config(integers("uint2", "per_group", False, **eight)), "ragged")


def add_inputs() -> None:
    """Add inputs and outputs, under int8 weights."""
    for name in ("Int8", "Uint8", "Int4", "Uint4", "FP8E4M3", "FP8E5M2"):
        for dynamic in (True, False):
            kind = "dynamic" if dynamic else "static"
            make = lambda n=name, d=dynamic: helper(f"{n}PerTensor", is_dynamic=d)  # noqa: E731
            add(f"a_{name.lower()}_{kind}", lambda make=make: config(int8(), make()))
        make = lambda n=name, **k: helper(f"{n}PerChannel", is_dynamic=True, **k)  # noqa: E731
        add(f"a_{name.lower()}_tokens", lambda make=make: config(int8(), make(ch_axis=1)))
        make = lambda n=name: helper(f"{n}PerGroup", **GROUP, is_dynamic=True)  # noqa: E731
        add(f"a_{name.lower()}_groups", lambda make=make: config(int8(), make()))
    unsigned = {"is_dynamic": True, "symmetric": True}
    add("a_uint8_symmetric", lambda: config(int8(), helper("Uint8PerTensor", **unsigned)))
    for axis in (0, -1):
        fields = {"ch_axis": axis, "is_dynamic": True}
        add(f"a_fp8_axis{axis}", lambda f=fields: config(int8(), helper("FP8E4M3PerChannel", **f)))
    for method in ("histogram", "percentile", "MSE"):
        inputs = lambda m=method: helper("Int8PerTensor", observer_method=m)  # noqa: E731
        add(f"a_int8_{method}", lambda inputs=inputs: config(int8(), inputs()))
    add("o_int8", lambda: config(int8(), *[helper("Int8PerTensor")] * 2))
    add("o_fp8", lambda: config(fp8(), fp8(), fp8()))
    add("bias_int8", lambda: config(int8(), None, None, helper("Int8PerTensor")), "biased")
    add("bias_float", lambda: config(integers("uint4", "per_group", False)), "biased")


def add_floats() -> None:
    """Add floats and formats with shared exponents."""
    for name in ("FP8E5M2PerTensor", "FP8E5M3PerTensor"):
        add(f"w_{name.lower()}", lambda n=name: config(helper(n)))
    for name in ("FP8E4M3PerChannel", "FP8E5M2PerChannel"):
        add(f"w_{name.lower()}", lambda n=name: config(helper(n, ch_axis=0)))
    for name, scale in product(
        ("FP8E4M3", "FP6E2M3", "FP6E3M2", "FP4"), ("float32", "e8m0", "e4m3", "e5m3")
    ):
        fields = {**GROUP, "scale_format": scale}
        fields |= {"scale_calculation_mode": "even"} if scale == "e8m0" else {}
        make = lambda d, n=name, f=fields: helper(f"{n}PerGroup", is_dynamic=d, **f)  # noqa: E731
        add(f"w_{name.lower()}_{scale}", lambda make=make: config(make(False), make(True)))
    for name in ("MXFP4", "MXFP6E3M2", "MXFP6E2M3", "MXFP8E4M3", "MXFP8E5M2", "MXINT8"):
        make = lambda d, n=name, **k: helper(f"OCP_{n}", ch_axis=-1, is_dynamic=d, **k)  # noqa: E731
        add(f"w_{name.lower()}", lambda make=make: config(make(False), make(True)))
        add(f"w_{name.lower()}_ragged", lambda make=make: config(make(False)), "ragged")
    for mode in ("floor", "ceil"):
        fields = {"ch_axis": -1, "scale_calculation_mode": mode}
        make = lambda d, f=fields: helper("OCP_MXFP4", is_dynamic=d, **f)  # noqa: E731
        add(f"w_mxfp4_{mode}", lambda make=make: config(make(False), make(True)))
    add("w_mxfp4_dynamic", lambda: config(helper("OCP_MXFP4", ch_axis=-1)))
    rows = {"ch_axis": 0, "is_dynamic": False}
    add("w_mxfp4_groups_of_rows", lambda: config(helper("OCP_MXFP4", **rows)))
    for element in ("fp4", "fp6_e3m2", "fp6_e2m3", "fp8_e4m3", "fp8_e5m2", "int8"):
        fields = {"mx_element_dtype": element, "scale_calculation_mode": "even", **GROUP}
        make = lambda d=None, f=fields: raw("mx", None, None, is_dynamic=d, **f)  # noqa: E731
        add(f"w_mx_{element}", lambda make=make: config(make(False)))
        add(f"a_mx_{element}", lambda make=make: config(int8(), make()))
    for name, fields in {"MX6": {"block_size": 16}, "MX9": {"block_size": 16}, "BFP16": {}}.items():
        make = lambda n=name, f=fields: helper(n, ch_axis=-1, **f)  # noqa: E731
        add(f"w_{name.lower()}", lambda make=make: config(make(), make()))
    for name in ("Bfloat16", "Float16"):
        add(f"w_{name.lower()}", lambda n=name: config(helper(n), helper(n)))


def add_stages() -> None:
    """Add specifications of two stages."""
    add("w_nvfp4", lambda: config(nvfp4(False)))
    add(
        "w_fp4_two_level_e5m3",
        lambda: config(stages("ScaleQuant", fp4(False), helper("FP8E5M3PerTensor"))),
    )
    fp6 = {"ch_axis": -1, "group_size": 16, "is_dynamic": False}
    add(
        "w_fp6_two_level",
        lambda: config(stages("ScaleQuant", helper("FP6E2M3PerGroup", **fp6), fp8())),
    )
    for name, second in {
        "int4_channel": lambda: integers("int4", "per_channel", True),
        "int4_group": lambda: integers("int4", "per_group", True),
        "uint4_group": lambda: integers("uint4", "per_group", False),
    }.items():
        add(f"w_fp8_{name}", lambda second=second: config(stages("Progressive", fp8(), second())))
    second = lambda: integers("int4", "per_channel", True)  # noqa: E731
    add("w_int8_int4_channel", lambda: config(stages("Progressive", int8(), second())))


def add_exports() -> None:
    """Add orders of packed codes, weights as values, and layouts of other tools."""
    for name in ("w_uint4_per_group_asymmetric", "w_int4_per_channel_symmetric"):
        add(f"order_{name}", CASES[name].config, pack_method="order")
    values = ("w_uint4_per_group_asymmetric", "w_int8_per_tensor_asymmetric", "w_mxfp4", "w_nvfp4")
    values += ("scheme_nvfp4", "scheme_int4_fp8", "w_fp8_int4_group", "w_fp4_two_level_e5m3")
    values += ("w_uint4_float_zeros", "w_uint2_per_group_asymmetric", "scheme_fp8_cache_fp8")
    for name in (*values, "w_int8_int4_channel", "w_fp4_e4m3", "w_int8_histogram"):
        add(f"values_{name}", CASES[name].config, weight_format="fake_quantized")
    for name, options in {"": {}, "_order": {"pack_method": "order"}}.items():
        make = lambda: template("uint4_wo_32", algorithm="awq")  # noqa: E731
        add(f"custom_awq{name}", make, custom_mode="awq", **options)
    add("custom_awq_int4", lambda: template("int4_wo_32", algorithm="awq"), custom_mode="awq")
    for name, inputs in {"": fp8, "_dynamic": lambda: fp8(is_dynamic=True)}.items():
        add(f"custom_fp8{name}", lambda inputs=inputs: config(fp8(), inputs()), custom_mode="fp8")
    add("custom_fp8_weights", lambda: config(fp8()), custom_mode="fp8")
    add("custom_fp8_cache", lambda: template("fp8", kv_cache_scheme="fp8"), custom_mode="fp8")


def add_patterns() -> None:
    """Add layers that differ, heads and embeddings."""

    def mixed() -> Any:
        layer = configs.QLayerConfig
        rules = {"*down_proj": layer(weight=int8()), "*o_proj": layer(weight=fp8())}
        return config(integers("uint4", "per_group", False), layer_quant_config=rules)

    add("mixed", mixed, "two layers")
    add("excluded", lambda: config(int8(), exclude=(*HEAD, "*layers.1.*")), "two layers")
    add("head", lambda: config(int8(), exclude=()))
    add("head_tied", lambda: config(int8(), exclude=()), "tied")
    tables = {torch.nn.Embedding: configs.QLayerConfig(weight=int8())}
    add("embedding", lambda: config(int8(), layer_type_quant_config=tables))
    for name, scheme in {
        "gptq": "uint4_wo_32",
        "awq": "uint4_wo_32",
        "smoothquant": "int8",
    }.items():
        add(f"algorithm_{name}", lambda s=scheme, name=name: template(s, algorithm=name))


def build(name: str, dtype: torch.dtype) -> Any:
    """Return a model, always with the same random values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **fields), dtype=dtype, attn_implementation="eager"
    ).eval()
    for key, value in model.named_parameters():
        if key.endswith("bias"):  # they start as zeros, which hides bugs
            torch.nn.init.normal_(value.detach(), std=0.1)
    return model


def write(case: Case, path: Path, batches: list[torch.Tensor], ids: torch.Tensor) -> dict[str, Any]:
    """Write the checkpoint of a case and its logits, and return its entry of the index."""

    @torch.no_grad()
    def logits(model: Any) -> torch.Tensor:
        result: torch.Tensor = model(ids).logits.float()
        return result

    def quantized() -> Any:
        quantizer = quark.ModelQuantizer(case.config())
        return quantizer.freeze(quantizer.quantize_model(build(case.model, case.dtype), batches))

    model = quantized()
    tensors, entry = {"logits": logits(model)}, {}
    try:
        quark.export_safetensors(model, path, **case.export)
    except Exception as error:  # there are no codes for this scheme
        entry["packed"] = f"{type(error).__name__}: {error}"[:100]
        quark.export_safetensors(quantized(), path, weight_format="fake_quantized")
    if "cache" in path.name:  # scales of keys and values are merged when they are exported
        float_model = build(case.model, case.dtype)
        loaded = quark.import_model_from_safetensors(float_model, str(path), device="cpu")
        tensors = {"logits": logits(loaded)}
    for file in path.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    save_file(tensors, path.with_suffix(".logits"))
    return entry


def main() -> None:
    if hasattr(quark, "ModelExporter"):
        raise SystemExit("this Python has Quark: run it with the Python that has AMD Quark")
    for add_some in (add_named, add_integers, add_inputs, add_floats, add_stages):
        add_some()
    add_exports()
    add_patterns()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, 32, (1, 12), generator=generator) for _ in range(3)]
    ids = torch.randint(3, 32, (1, 8), generator=generator)
    index: dict[str, Any] = {}
    owner = {"uid": 0, "gid": 0, "uname": "", "gname": "", "mtime": 0, "deep": False}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file({"input_ids": ids}, folder / "inputs.safetensors")
        for name, case in CASES.items():
            log = io.StringIO()
            try:
                with contextlib.redirect_stdout(log):
                    index[name] = write(case, folder / name, batches, ids)
            except Exception as error:
                index[name] = {"error": f"{type(error).__name__}: {error}"[:100]}
                shutil.rmtree(folder / name, ignore_errors=True)
            print(name, index[name], file=sys.stderr, flush=True)
        (folder / "index.json").write_text(json.dumps(index, indent=1))
        with tarfile.open(sys.argv[1], "w:xz", preset=9) as archive:
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                archive.add(
                    file, file.relative_to(folder), filter=lambda info: info.replace(**owner)
                )


if __name__ == "__main__":
    main()
