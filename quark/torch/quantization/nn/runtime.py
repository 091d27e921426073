"""How loaded models compute: with the bits of the quantized values, or with faster products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from quark.torch.quantization.nn.runtime_layer import RUNTIMES, RuntimeLayer


def check_runtime(runtime: str) -> None:
    """Check the name of a runtime.

    Raises:
        ValueError: The name is unknown.
    """
    if runtime not in RUNTIMES:
        raise ValueError(f"runtime={runtime!r} is unknown: give one of {', '.join(RUNTIMES)}.")


def set_runtime(model: nn.Module, runtime: str) -> nn.Module:
    """Choose how the packed layers of a loaded model compute, in place, and return the model.

    Layers for which a runtime has nothing faster, and models without packed layers, compute as
    before. What a model saves and exports stays the same.

    Args:
        model: A model that was loaded from a quantized checkpoint.
        runtime: ``exact``: the weight is unpacked at each use; the bits of the frozen model.
            ``auto``: packed products that add in another order, with inputs in their own type.
            ``fast``: also packed products that round inputs to bfloat16.
            ``compiled``: as ``fast``, and products that neither torch nor numba has a kernel for
            are compiled once on this machine, which takes up to a minute for a format.
            On GPUs, these three are one: kernels of Triton, with inputs in their own type.
            ``unpacked``: weights are unpacked once, at the memory and speed of the float model and
            with the bits of ``exact``.

    Raises:
        ValueError: The name is unknown.
    """
    check_runtime(runtime)
    for layer in _layers(model):
        layer.set_runtime(runtime)
    return model


def describe_runtime(model: nn.Module) -> dict[str, str]:
    """Return the product of each packed layer, by the name of the layer.

    It is ``unpacked at each use``, ``unpacked once``, ``panels``, ``native``, ``compiled``,
    ``triton``, or the name of a kernel, such as ``int8``, which multiplies few rows; panels
    multiply many.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RuntimeLayer)}
    return {name: layer.product_name for name, layer in layers.items()}


@dataclass(frozen=True)
class RuntimeOptions:
    """Options of ``enable_native_inference``.

    Attributes:
        runtime: As ``set_runtime`` takes it.
        native_linear_mode: Must be ``auto``: the format of each layer decides about its product.
    """

    runtime: str = "fast"
    native_linear_mode: str = "auto"

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            ValueError: The runtime is unknown, or the mode is not ``auto``.
        """
        check_runtime(self.runtime)
        if self.native_linear_mode != "auto":
            raise ValueError(
                f"native_linear_mode={self.native_linear_mode!r} is not supported: the format of "
                "each layer decides about its product. Leave it out, and give "
                "runtime='compiled' for formats without a kernel, such as fp8."
            )


def enable_native_inference(
    model: nn.Module, runtime_options: RuntimeOptions | None = None
) -> nn.Module:
    """Let a loaded model use the fastest products, in place; see ``set_runtime``.

    Args:
        model: A model that was loaded from a quantized checkpoint.
        runtime_options: Which runtime to use; by default ``fast``.
    """
    return set_runtime(model, (runtime_options or RuntimeOptions()).runtime)


def disable_native_inference(model: nn.Module) -> nn.Module:
    """Let the packed layers of a model compute the bits of the frozen model again, in place."""
    return set_runtime(model, "exact")


def _layers(model: nn.Module) -> Iterator[RuntimeLayer]:
    return (module for module in model.modules() if isinstance(module, RuntimeLayer))
