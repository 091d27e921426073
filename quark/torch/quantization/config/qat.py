"""Options of trained ranges."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.serialize import known, plain
from quark.torch.quantization.config.type import TQTThresholdInitMeth
from quark.torch.quantization.config.value_types import check_options
from quark.torch.quantization.observer.registry import is_observer


@dataclass
class QATSpec:
    """Scales that are trained, each as the step size of its codes (LSQ, Esser et al. 2020)."""

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain JSON types, with the name of the class."""
        options = {f.name: plain(getattr(self, f.name)) for f in fields(self)}
        return {"name": type(self).__name__, **options}


@dataclass
class TQTSpec(QATSpec):
    """Power-of-two scales that are trained by the logarithm of a threshold (TQT, Jain et al. 2020).

    Attributes:
        threshold_init_meth: First threshold: ``_3SD``, three standard deviations, or ``_KL_J``,
            least divergence of histograms, per tensor only. Defaults to ``_KL_J`` for activations
            with one scale, else to ``_3SD``.

    Raises:
        TypeError: The method is no name.
        ValueError: The name of the method is unknown.
    """

    threshold_init_meth: TQTThresholdInitMeth | None = None

    def __post_init__(self) -> None:
        method = self.threshold_init_meth
        if isinstance(method, str):
            name = one_of(method, TQTThresholdInitMeth.__members__, "threshold_init_meth")
            self.threshold_init_meth = TQTThresholdInitMeth[name]
        check_options(self)


_CLASSES: dict[str, type[QATSpec]] = {"QATSpec": QATSpec, "TQTSpec": TQTSpec}


def qat_spec_from_dict(data: Any) -> QATSpec:
    """Return the options of a dict from ``to_dict``.

    Raises:
        ValueError: The name or a key is unknown, or there is no name.
    """
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ValueError(f"qat_spec: expected an object with a name, got {data!r}.")
    cls = _CLASSES[one_of(data["name"], _CLASSES, "qat_spec.name")]
    options = {key: value for key, value in data.items() if key != "name"}
    return cls(**known(options, cls, "qat_spec"))


def default_training_observer(qat_spec: Any) -> str | None:
    """Return the name of the observer of the first range of ``qat_spec``.

    It is None if no range is trained.
    """
    if not isinstance(qat_spec, QATSpec):
        return None
    return "TQTObserver" if isinstance(qat_spec, TQTSpec) else "LSQObserver"


def range_training(qat_spec: Any, observer: Any) -> str | None:
    """Return how the scale of a tensor is trained: ``lsq``, ``tqt`` or None.

    Args:
        qat_spec: Options of the training.
        observer: Class of the observer, or its name.
    """
    if isinstance(qat_spec, TQTSpec) or is_observer(observer, "TQTObserver"):
        return "tqt"
    if isinstance(qat_spec, QATSpec) or is_observer(observer, "LSQObserver"):
        return "lsq"
    return None


def training_problem(spec: Any) -> str | None:
    """Return why a ``QuantizationSpec`` cannot have trained scales although it asks for them."""
    qat_spec, observer = spec.qat_spec, spec.given_observer
    training = range_training(qat_spec, observer)
    if training is None or not isinstance(observer, (str, type)):
        return None
    if spec.is_dynamic or spec.second_stage is not None or spec.is_scale_quant:
        return "trained scales are static and of one stage: leave out is_dynamic and other stages."
    is_free = spec.fmt.scaled and spec.fmt.has_rule and not spec.scheme.shares_exponents
    if not is_free or spec.scheme.scale.fmt is not None:
        return (
            "trained scales need integers or floats with scales in float32, float16, bfloat16 or "
            "pof2. "
            "Leave out qat_spec and trained observers: weights train without them too."
        )
    if training == "lsq":
        return None
    is_mixed = qat_spec is not None and not isinstance(qat_spec, TQTSpec)
    if is_observer(observer, "LSQObserver") or is_mixed:
        return "LSQObserver goes with QATSpec(), TQTObserver with TQTSpec()."
    if spec.fmt.is_float or spec.symmetric is False:
        return "trained thresholds (TQT) need a symmetric integer format; QATSpec() trains others."
    method = getattr(qat_spec, "threshold_init_meth", None)
    if method is not None and not is_observer(observer, "TQTObserver"):
        return f"threshold_init_meth is for TQTObserver, got {spec.observer_cls.__name__}."
    if method is TQTThresholdInitMeth._KL_J and spec.scheme.qscheme is not QSchemeType.per_tensor:
        return "threshold_init_meth=_KL_J is for one scale per tensor: use _3SD."
    return None
