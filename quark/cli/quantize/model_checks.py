"""Checks of flags of ``quark quantize`` that need the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark.cli import console

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.quantization.config.config import Config


def check_outputs(model: nn.Module, config: Config) -> None:
    """Check that the model has the layers whose outputs are keys, values and queries.

    Raises:
        typer.BadParameter: It has none.
    """
    from quark.torch.quantization.config.match import matches

    patterns = list(config.kv_cache_quant_config)
    names = [name for name, _ in model.named_modules()]
    if patterns and not any(matches(name, patterns) for name in names):
        raise console.wrong(
            "--kv_cache_dtype",
            f"{type(model).__name__} has no layers that match {' or '.join(patterns)}. Leave it "
            "out, or give a Config that names the layers with --config.",
        )
    spec = config.softmax_quant_spec
    layers = config.layer_quant_config.items()
    patterns = [p for p, layer in layers if layer.output_tensors == spec and p not in patterns]
    if spec is not None and patterns and not any(matches(name, patterns) for name in names):
        raise console.wrong(
            "--attention_scheme",
            f"{type(model).__name__} has no layers that match {' or '.join(patterns)}, which "
            "compute queries. Leave it out, or give a Config that names them with --config.",
        )


def check_shared_inputs(model: nn.Module) -> None:
    """Check that layers of the model share an input, and so can share scales.

    Raises:
        typer.BadParameter: None do.
    """
    import torch

    from quark.torch.graph.shared_inputs import same_input_groups
    from quark.torch.pipeline.batches import run_batch

    batch = torch.ones(1, 8, dtype=torch.int64)
    if not same_input_groups(model, lambda: run_batch(model, batch)):
        raise console.wrong("--weight_matrix_merge", "no layers of this model share an input.")
