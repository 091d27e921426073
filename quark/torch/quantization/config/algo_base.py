"""The base classes of the options of algorithms, and their names in earlier versions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from quark.torch.quantization.config.bounds import Fraction
from quark.torch.quantization.config.name_lookup import unknown
from quark.torch.quantization.config.value_types import check_options

# Option of an earlier version -> its present name; None for an option without effect.
_RENAMED: dict[str, str | None] = {
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "random": "random_r1",
    "random2": "random_r2",
    "online_had": "r4",
    "kv_cache_quant": "r3",
    "act_quant": None,
}


def present_options(data: dict[str, Any], cls: type, what: str) -> dict[str, Any]:
    """Return options under their present names.

    Args:
        data: Options, some under names of earlier versions.
        cls: Dataclass of the options.
        what: What an option is called in the message.

    Raises:
        ValueError: An option is unknown.
    """
    known = sorted(f.name for f in fields(cls))
    options: dict[str, Any] = {}
    for key, value in data.items():
        name = _present_name(key, known)
        if name is None:
            continue
        if name not in known:
            raise ValueError(unknown(key, known, what))
        options[name] = value
    return options


def _present_name(key: str, known: Iterable[str]) -> str | None:
    """Return the present name of an option; None if it has no effect."""
    return key if key in known else _RENAMED.get(key, key)


class _AcceptsEarlierNames(type):
    """Lets a class of options be called with names of earlier versions, as files have them."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        known = getattr(cls, "__dataclass_fields__", ())
        present = {_present_name(key, known): value for key, value in options.items()}
        return super().__call__(*args, **{k: v for k, v in present.items() if k is not None})


class AlgoConfig(metaclass=_AcceptsEarlierNames):
    """Base class of the options of an algorithm. ``name`` names the algorithm in files.

    Raises:
        TypeError: An option has a value of another type.
        ValueError: A number is outside of its range, or ``name`` is not that of the class.
    """

    name: str

    def __post_init__(self) -> None:
        check_options(self)
        own = getattr(type(self), "name", self.name)
        if self.name != own:
            raise ValueError(
                f"{type(self).__name__}.name: expected {own!r}, got {self.name!r}. Leave it out, "
                "or use the class of the other algorithm."
            )

    def steps(self) -> list[AlgoConfig]:
        """Return the options of the algorithms to apply in turn: this one, for most options."""
        return [self]


class RandomTokensConfig(AlgoConfig):
    """Base class of the options of an algorithm whose data may have random sequences.

    Attributes:
        random_tokens: Sequences of random tokens that are added to the data, for each sequence of
            it, between 0 and 1.
    """

    random_tokens: Fraction


class PreQuantOptConfig(AlgoConfig):
    """Base class of the options of an algorithm that transforms weights before rounding."""


class BlockAlgoConfig(AlgoConfig):
    """Base class of the options of an algorithm that works on layers of decoder blocks.

    Attributes:
        inside_layer_modules: Names of the layers of a block to change. Empty: all quantized layers.
        model_decoder_layers: Name of the list of decoder blocks. Empty: discovered.
    """

    inside_layer_modules: list[str]
    model_decoder_layers: str


class RoundingConfig(BlockAlgoConfig):
    """Base class of the options of algorithms that replace weights by rounded weights."""
