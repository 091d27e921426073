"""Quantization of the probabilities of attention.

An attention module with quantized probabilities has a quantizer, and a route (``nn.attention``)
that calls the default function of its architecture. The results of softmax inside of that function
are quantized. Other functions, such as ``sdpa``, never have all probabilities of a query.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.attention import (
    PROBABILITIES,
    route_attention,
    uses_interface,
)
from quark.torch.quantization.nn.quantizer import TensorQuantizer


def probability_modules(
    model: nn.Module, layers: Mapping[str, QuantizationConfig], config: Config
) -> list[str]:
    """Return the attention modules whose probabilities are quantized: those of quantized layers.

    Args:
        model: A float model.
        layers: Configuration of each quantized layer, by its name.
        config: Configuration of the model.

    Raises:
        ValueError: An attention module with quantized queries, or all of them, do not use the
            attention interface of Transformers.
    """
    if config.softmax_quant_spec is None:
        return []
    parents = {name.rpartition(".")[0] for name in layers}
    names = [n for n, m in model.named_modules() if n in parents and uses_interface(m)]
    with_outputs = {n.rpartition(".")[0] for n, c in layers.items() if c.output_tensors is not None}
    outside = sorted(with_outputs.difference(names))
    if outside or not names:
        where = outside[0] if outside else f"no attention module of {type(model).__name__}"
        verb = "does not use" if outside else "uses"
        raise ValueError(
            f"softmax_quant_spec: {where} {verb} the attention interface of Transformers, so its "
            "probabilities cannot be quantized. Leave attention_scheme and softmax_quant_spec out."
        )
    return names


def quantize_probabilities(
    model: nn.Module, names: Sequence[str], spec: QuantizationSpec | None
) -> None:
    """Quantize the probabilities of attention modules, which are set to their default function.

    Args:
        model: A model; it is changed in place.
        names: Result of ``probability_modules``.
        spec: How they are quantized; None only without names.
    """
    for name in names:
        module: Any = model.get_submodule(name)
        assert spec is not None
        quantizer = TensorQuantizer(spec)
        quantizer.end_training()  # it does not follow probabilities
        module.add_module(PROBABILITIES, quantizer.train(module.training))
        config = route_attention(module).config
        # Masks are made by the model for the function that its configuration names.
        config._attn_implementation = "eager"


def probability_quantizers(model: nn.Module) -> Iterator[tuple[str, TensorQuantizer]]:
    """Iterate over (name of the attention module, quantizer of its probabilities)."""
    for name, module in model.named_modules():
        quantizer = module._modules.get(PROBABILITIES)
        if isinstance(quantizer, TensorQuantizer):
            yield name, quantizer


def find_idle(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the attention modules whose quantizers, which observe, have seen no probabilities."""
    quantizers = dict(probability_quantizers(model))
    return [name for name in names if quantizers[name].observer.is_empty]
