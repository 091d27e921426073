"""The observers that a configuration may name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.observer.observer import ObserverBase

_PACKAGE = "quark.torch.quantization.observer"

# Documented name -> module of the observer.
OBSERVERS: dict[str, str] = {
    "PlaceholderObserver": "observer",
    "PerTensorMinMaxObserver": "observer",
    "PerChannelMinMaxObserver": "observer",
    "PerGroupMinMaxObserver": "observer",
    "PerBlock2DMinMaxObserver": "observer",
    "PerBlockMXObserver": "observer",
    "PerBlockMXBufferReuseObserver": "observer",
    "PerBlockBFPObserver": "observer",
    "MovingAverageMinMaxObserver": "observer",
    "PerTensorPowOf2MinMaxObserver": "observer",
    "PerChannelPowOf2MinMaxObserver": "observer",
    "PerTensorHistogramObserver": "histogram",
    "PerTensorHistogramObserverPro": "histogram",
    "PerTensorPercentileObserver": "histogram",
    "PerTensorMSEObserver": "histogram",
    "PerTensorExtrapolatedMinMaxObserver": "extrapolation",
    "PerHeadMSEObserver": "heads",
    "PerBlockMXDiffsObserver": "scale_search",
    "PerChannelMSEObserver": "scale_search",
    "PerGroupMSEObserver": "scale_search",
    "PerTensorPowOf2MinMSEObserver": "scale_search",
    "PerChannelPowOf2MinMSEObserver": "scale_search",
    "LSQObserver": "lsq_observer",
    "TQTObserver": "tqt_observer",
}

# Documented ``observer_method`` names of per-tensor statistics.
OBSERVER_METHODS: dict[str, str] = {
    "min_max": "PerTensorMinMaxObserver",
    "extrapolated_min_max": "PerTensorExtrapolatedMinMaxObserver",
    "histogram": "PerTensorHistogramObserver",
    "histogrampro": "PerTensorHistogramObserverPro",
    "MSE": "PerTensorMSEObserver",
    "percentile": "PerTensorPercentileObserver",
}


def observer_class(name: str) -> type[ObserverBase]:
    """Return the observer called ``name``, one of ``OBSERVERS``."""
    module = import_module(f"{_PACKAGE}.{OBSERVERS[name]}")
    observer: type[ObserverBase] = getattr(module, name)
    return observer


def observer_problem(spec: Any) -> str | None:
    """Return why the observer of a specification does not fit it; None if it does."""
    given = spec.observer_cls
    if given is None:
        return None
    if not (isinstance(given, type) and issubclass(given, ObserverBase)):
        return f"observer_cls must be an observer class, got {given!r}."
    is_integer = not spec.fmt.is_float and not spec.scheme.shares_exponents
    if given.is_for_integers and not is_integer:
        return (
            f"{given.__name__} weighs cutting against rounding to equal steps, which "
            f"{spec.dtype.name} does not have: give an integer dtype, or another observer_cls."
        )
    return None


def default_observer(scheme: Scheme) -> type[ObserverBase]:
    """Return the default observer of a scheme: minimum and maximum."""
    if not scheme.fmt.scaled:
        return observer_class("PlaceholderObserver")
    if scheme.fmt.block:
        return observer_class("PerBlockBFPObserver")
    is_grouped_float = scheme.fmt.is_float and scheme.qscheme is QSchemeType.per_group
    if scheme.shares_exponents or is_grouped_float:
        return observer_class("PerBlockMXObserver")
    names = {
        QSchemeType.per_tensor: "PerTensorMinMaxObserver",
        QSchemeType.per_channel: "PerChannelMinMaxObserver",
        QSchemeType.per_group: "PerGroupMinMaxObserver",
        QSchemeType.per_block: "PerBlock2DMinMaxObserver",
        QSchemeType.per_head: "PerGroupMinMaxObserver",
    }
    return observer_class(names[scheme.qscheme])
