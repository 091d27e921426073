"""Sound files of each kind, small: what doors open and the fuzzer damages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LAYOUTS = (
    "quark",
    "awq",
    "gptq",
    "compressed-tensors",
    "fp8",
    "modelopt",
    "mxfp8",
    "mlx",
    "torchao",
    "mxfp4",
    "transforms",
)  # of safetensors; transforms are rotations of inputs for compressed-tensors
# Schemes whose tensors compressed-tensors stores in other ways than integers of 4 bits.
# There is a layout mxfp8 too.
COMPRESSED = ("int5_wo_32", "nvfp4", "compressed mxfp8", "mxfp6_e2m3", "ptpc_fp8")
# Schemes of the layout modelopt, whose own kind of files holds weights alone.
MODELOPT = ("modelopt fp8", "modelopt nvfp4")
# Schemes whose scales the layout of Quark stores in other ways than as floats.
OWN_SCALES = ("amdfp4", "mx6", "bfp16")
# Kinds of files that can hold two layers alone, which open in a few milliseconds.
LAYERS = tuple(
    f"layers {name}"
    for name in (
        *(layout for layout in LAYOUTS if layout != "mxfp4"),  # which needs experts
        *("fp8 blocks", "native", "int8"),
        *(*COMPRESSED, *MODELOPT, *OWN_SCALES),
    )
)
# Kind of files -> schemes of attention, cache and weights ("": in float), layout.
ATTENTION = {
    "attention": ("qkv_fp8", "", "int4_wo_32", "compressed-tensors"),
    "attention per head": ("qkv_int8_per_head", "", "", "compressed-tensors"),
    "attention quark": ("qkv_fp8_per_head", "", "int8_wo", "quark"),
    "attention probabilities": ("fp8", "int4_per_head", "int8_wo", "quark"),
}
TOKENS = 64  # of the models
MODEL = "params"  # name of the files of save_params
GRAPH = "fx_graph_mode"


def ids() -> torch.Tensor:
    """Return tokens, (2, 6) int64."""
    return torch.arange(12).reshape(2, 6)


def images() -> torch.Tensor:
    """Return inputs of the graphs, (2, 3, 8, 8)."""
    return torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)


def build_float(vocabulary: int = 64, **sizes: int) -> Any:
    """Return a small Llama in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes, vocab_size=vocabulary)).eval()


class Layers(nn.Module):
    """A decoder block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {"up_proj": nn.Linear(64, 32, bias=False), "down_proj": nn.Linear(32, 32)}
        self.layers = nn.ModuleList([nn.ModuleDict(layers)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return outputs, (rows, 32), of inputs, (rows, 64)."""
        for layer in self.layers[0].values():
            values = layer(values)
        return values


def rows() -> torch.Tensor:
    """Return inputs of the two layers, (2, 64)."""
    return torch.linspace(-1, 1, 128).reshape(2, 64)


def build_experts() -> Any:
    """Return a small gpt-oss in float32."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 64}
    return GptOssForCausalLM(GptOssConfig(**sizes)).eval()


def build_model(kind: str) -> Any:
    """Return a small quantized Llama, or two layers, that files of a kind can hold."""
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import Config, QuantizationConfig
    from quark.torch.quantization.config.presets import scheme
    from quark.torch.quantization.config.spec import QuantizationSpec

    if kind in ATTENTION:
        return _build_attention(*ATTENTION[kind][:3])
    kind, is_whole = kind.removeprefix("layers "), not kind.startswith("layers ")
    weight = QuantizationSpec(
        "uint4", qscheme="per_group", ch_axis=-1, group_size=32, symmetric=False, is_dynamic=False
    )
    layer = QuantizationConfig(weight=weight)
    if kind == "fp8":
        whole = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
        inputs = QuantizationSpec(**whole, is_dynamic=True)
        layer = QuantizationConfig(inputs, weight=QuantizationSpec(**whole, is_dynamic=False))
    elif kind == "int8":
        weight = QuantizationSpec(
            "int8", qscheme="per_channel", ch_axis=0, symmetric=True, is_dynamic=False
        )
        layer = QuantizationConfig(weight=weight)
    elif kind == "fp8 blocks":
        blocks = {"qscheme": "per_block", "block_size": [32, 32]}
        groups = {"qscheme": "per_group", "ch_axis": -1, "group_size": 32}
        inputs = QuantizationSpec("fp8_e4m3", **groups, is_dynamic=True)
        weight = QuantizationSpec("fp8_e4m3", **blocks, is_dynamic=False)
        layer = QuantizationConfig(inputs, weight=weight)
    elif kind == "mxfp4":
        experts = Config(layer_quant_config={"*.experts.*": scheme("mxfp4_weight_only")})
        return ModelQuantizer.freeze(ModelQuantizer(experts).quantize_model(build_experts()))
    elif kind in ("modelopt", "mxfp8"):
        layer = scheme({"modelopt": "nvfp4_weight_only"}.get(kind, kind))
    elif kind == "transforms":
        layer = scheme("int4_wo_32")
    elif kind in (*COMPRESSED, *MODELOPT, *OWN_SCALES):
        layer = scheme(kind.removeprefix("compressed ").removeprefix("modelopt "))
    if is_whole:
        model, data = build_float(2048 if kind == "gguf" else 64), ids()  # tokens of the tokenizer
    else:
        model, data = Layers().eval(), rows()
    excluded = ["lm_head"] if is_whole else []
    config = Config(layer, exclude=excluded, algo_config=_rotations(kind, is_whole=is_whole))
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, [data]))


def _build_attention(scheme: str, cache: str, weights: str) -> Any:
    """Return a small Llama with quantized attention, by the names of its schemes."""
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.quantization.config.config import QuantizationConfig

    config = LLMTemplate.get("llama").get_config(
        weights or "int8_wo", attention_scheme=scheme, kv_cache_scheme=cache or None
    )
    if not weights:
        config = replace(config, global_quant_config=QuantizationConfig())
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(build_float(), [ids()]))


def _rotations(kind: str, *, is_whole: bool) -> list[Any]:
    """Return the rotations of the model of a kind of files: none but for transforms."""
    from quark.torch.quantization.config.algo import OnlineRotationConfig, RotationConfig

    if kind != "transforms":
        return []
    online = OnlineRotationConfig(online_rotation_layers=["*_proj"])
    return [RotationConfig(r1=is_whole, r2=is_whole, rotation_size=32, online_config=online)]


def build_float_graph() -> Any:
    """Return the exported graph of a small float network."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10)
    )
    return torch.export.export(network.eval(), (images(),)).module()


def build_graph(graph: Any = None) -> Any:
    """Return a graph, by default that one, with quantized layers and edges."""
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import (
        Config,
        Int8PerTensorSpec,
        QuantizationConfig,
        Uint8PerTensorSpec,
    )

    common = {"observer_method": "min_max", "scale_type": "float", "round_method": "half_even"}
    spec = Int8PerTensorSpec(**common, symmetric=True, is_dynamic=False)
    edge = Uint8PerTensorSpec(**common, symmetric=False, is_dynamic=False).to_quantization_spec()
    layer = QuantizationConfig(edge, edge, spec.to_quantization_spec())
    quantizer = ModelQuantizer(Config(layer, quant_mode=GRAPH, log_severity_level=3))
    return quantizer.freeze(
        quantizer.quantize_model(graph or build_float_graph(), [images()]).eval()
    )


class Residual(nn.Module):
    """Two blocks of a linear layer each, beside which values pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.ModuleDict({"proj": nn.Linear(32, 32)}) for _ in range(2)]
        self.layers = nn.ModuleList(blocks)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return outputs, (sequences, tokens, 32), of inputs of the same shape."""
        for block in self.layers:
            values = values + block["proj"](values)
        return values


def sequences() -> torch.Tensor:
    """Return inputs of the blocks, (2, 8, 32)."""
    return torch.linspace(-1, 1, 512).reshape(2, 8, 32)


def quantize_blocks(journal: Path) -> Any:
    """Return blocks that GPTQ quantized one by one, with a journal that stays."""
    from quark.torch import Journal, ModelQuantizer
    from quark.torch.quantization.config.config import Config, GPTQConfig, QuantizationConfig
    from quark.torch.quantization.config.spec import QuantizationSpec

    weight = QuantizationSpec(
        "int4", qscheme="per_group", ch_axis=-1, group_size=32, symmetric=True, is_dynamic=False
    )
    config = Config(QuantizationConfig(weight=weight), algo_config=[GPTQConfig()])
    with Journal(journal) as opened:
        quantizer = ModelQuantizer(config, journal=opened)
        return quantizer.freeze(quantizer.quantize_model(Residual().eval(), [sequences()]))


def write(kind: str, directory: Path) -> None:
    """Write sound files of a kind."""
    from quark.torch import ModelExporter, collect_statistics, save_params, save_statistics
    from quark.torch.digests import write_digests

    exporter = ModelExporter(directory)
    if kind == "float":
        build_float().save_pretrained(directory)
        write_digests(directory)
    elif kind == "statistics":
        save_statistics(collect_statistics(build_float(), [ids()], 1), directory)
    elif kind == "options":
        directory.mkdir()
        options = {"name": "awq", "scaling_layers": [{"prev_op": "a", "layers": ["b", "c"]}]}
        (directory / "options.json").write_text(json.dumps(options))
    elif kind == "params":
        save_params(build_model(kind), MODEL, export_dir=directory, compressed=True)
    elif kind.endswith("native"):
        exporter.export_quark_model(build_model(kind))
    elif kind == "gguf":
        _write_gguf(build_model(kind), directory, {})
        write_digests(directory)
    elif kind == "k-quants":
        _write_k_quants(directory)
    elif kind == "onnx":
        exporter.export_onnx_model(build_model(kind), {"input_ids": ids()})
    elif kind == "archive":
        save_params(build_graph(), MODEL, (images(),), None, directory, GRAPH)
    elif kind == "program":
        directory.mkdir()
        program = torch.export.export(build_float_graph(), (images(),))
        torch.export.save(program, directory / "model.pt2")
    elif kind == "graph":
        exporter.export_safetensors_model(build_graph())
    elif kind == "journal":
        quantize_blocks(directory)
        sorted((directory / "blocks").iterdir())[-1].unlink()  # as if it had been killed
    else:
        layout = kind.removeprefix("layers ")
        mode = ATTENTION[kind][3] if kind in ATTENTION else _MODES.get(layout, layout)
        exporter.export_safetensors_model(
            build_model(kind), custom_mode=mode, max_shard_size="40kB"
        )


# Kind of files -> layout, where it is another name.
_MODES = {
    **{"fp8 blocks": "fp8", "int8": "quark", **dict.fromkeys(OWN_SCALES, "quark")},
    **dict.fromkeys(("transforms", *COMPRESSED), "compressed-tensors"),
    **dict.fromkeys(MODELOPT, "modelopt"),
}

# Part of the name of a tensor -> type of its blocks, places of float16 scales in a block.
Blocks = dict[str, tuple[str, tuple[int, ...]]]
_BLOCKS: Blocks = {
    "ffn_down": ("Q4_K", (0, 2)),
    "ffn_up": ("NVFP4", ()),  # its scales are any bytes
    "attn_v": ("IQ4_NL", (0,)),
    "output.weight": ("Q6_K", (208,)),
}


def _write_k_quants(directory: Path) -> None:
    """Write a GGUF file of 64 tokens some of whose tensors are random blocks of several types."""
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import Config, QuantizationConfig
    from quark.torch.quantization.config.spec import QuantizationSpec

    weight = QuantizationSpec(
        "int8", qscheme="per_group", ch_axis=-1, group_size=32, symmetric=True, is_dynamic=False
    )
    model = build_float(2048, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    model = ModelQuantizer(Config(QuantizationConfig(weight=weight))).quantize_model(model)
    _write_gguf(ModelQuantizer.freeze(model), directory, _BLOCKS)


def _write_gguf(model: Any, directory: Path, blocks: Blocks) -> None:
    """Write a model of 2048 tokens as a GGUF file of 64 tokens, which opens in half the time.

    Args:
        model: The model.
        directory: Directory of the file.
        blocks: Types of tensors that random blocks replace; see ``_BLOCKS``.
    """
    import gguf

    from quark.demo.text import model_directory
    from quark.torch import ModelExporter

    plain = directory / "plain"
    ModelExporter(plain).export_gguf_model(model, model_directory(), "model")
    reader = gguf.GGUFReader(plain / "model.gguf")
    writer = gguf.GGUFWriter(directory / "model.gguf", "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            value = field.contents()
            if isinstance(value, list):
                value = value[:TOKENS]
            elif value == 2048:
                value = TOKENS
            writer.add_key_value(name, value, field.types[0], inner)
    for tensor, data, kind in _with_blocks(reader.tensors, blocks):
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.rmtree(plain)


def _with_blocks(tensors: list[Any], blocks: Blocks) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each tensor of a GGUF file, its data for 64 tokens, and the type of the data."""
    import gguf
    import numpy as np

    chance = np.random.default_rng(0)
    for tensor in tensors:
        data, number = tensor.data, tensor.tensor_type
        if len(data) == 2048:
            data = data[:TOKENS]
        for part, (kind, places) in blocks.items():
            if part in tensor.name:
                number = gguf.GGMLQuantizationType[kind]
                elements, size = gguf.GGML_QUANT_SIZES[number]
                rows, count = len(data), len(data) * int(tensor.shape[0]) // elements
                drawn = chance.integers(0, 256, (count, size), dtype=np.uint8)
                for place in places:
                    scale = np.full((count, 1), 1e-4, np.float16).view(np.uint8)
                    drawn[:, place : place + 2] = scale
                data = drawn.reshape(rows, -1)
        yield tensor, data, number
