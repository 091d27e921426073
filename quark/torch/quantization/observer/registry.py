"""The observers that a configuration may name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scheme import Scheme

if TYPE_CHECKING:
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
    "SuperBlockObserver": "super_blocks",
    "LSQObserver": "lsq_observer",
    "TQTObserver": "tqt_observer",
}

# Names of those that take integers alone.
FOR_INTEGERS = {"PerTensorExtrapolatedMinMaxObserver"}

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


class ObserverField:
    """Field of a dataclass that is given the class of an observer, or its name in ``OBSERVERS``.

    A name becomes the class when the field is read: a configuration is read without torch.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, cls: type) -> None: ...

    @overload
    def __get__(self, owner: object, cls: type) -> type[ObserverBase] | None: ...

    def __get__(self, owner: object | None, cls: type) -> type[ObserverBase] | None:
        if owner is None:
            return None  # default of the field
        given = self.given(owner)
        return observer_class(given) if isinstance(given, str) else given

    def __set__(self, owner: object, value: type[ObserverBase] | str | None) -> None:
        vars(owner)[self._name] = value

    def given(self, owner: object) -> type[ObserverBase] | str | None:
        """Return the class or the name that was given."""
        given: type[ObserverBase] | str | None = vars(owner)[self._name]
        return given


def is_observer(given: type[ObserverBase] | str | None, name: str) -> bool:
    """Whether an observer, a class or a name, is the one called ``name`` or derives from it."""
    if isinstance(given, str):
        return given == name
    return isinstance(given, type) and issubclass(given, observer_class(name))


def observer_problem(spec: Any) -> str | None:
    """Return why the observer of a specification does not fit it; None if it does."""
    given = spec.given_observer
    is_integer = not spec.fmt.is_float and not spec.scheme.shares_exponents
    if given is None or (isinstance(given, str) and (is_integer or given not in FOR_INTEGERS)):
        return None  # and its class is not imported
    from quark.torch.quantization.observer.observer import ObserverBase

    given = spec.observer_cls
    if not (isinstance(given, type) and issubclass(given, ObserverBase)):
        return f"observer_cls must be an observer class, got {given!r}."
    if given.is_for_integers and not is_integer:
        return (
            f"{given.__name__} weighs cutting against rounding to equal steps, which "
            f"{spec.dtype.name} does not have: give an integer dtype, or another observer_cls."
        )
    return None


def default_observer(scheme: Scheme) -> str:
    """Return the name of the default observer of a scheme: minimum and maximum."""
    if not scheme.fmt.scaled:
        return "PlaceholderObserver"
    if scheme.fmt.block:
        return "PerBlockBFPObserver"
    is_grouped_float = scheme.fmt.is_float and scheme.qscheme is QSchemeType.per_group
    if scheme.shares_exponents or is_grouped_float:
        return "PerBlockMXObserver"
    names = {
        QSchemeType.per_tensor: "PerTensorMinMaxObserver",
        QSchemeType.per_channel: "PerChannelMinMaxObserver",
        QSchemeType.per_group: "PerGroupMinMaxObserver",
        QSchemeType.per_block: "PerBlock2DMinMaxObserver",
        QSchemeType.per_head: "PerGroupMinMaxObserver",
    }
    return names[scheme.qscheme]
