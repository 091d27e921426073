"""Tokens per window that a model can take."""

from typing import Any

from quark.cli.console import wrong

UNBOUNDED = 1 << 20  # tokens, for models without a maximum length
_LENGTH = "max_position_embeddings"


def window_length(
    config: dict[str, Any], wanted: int | None, default: int, flag: str = "--seq_len"
) -> int:
    """Return the tokens per window: the requested number, or the default up to the model's maximum.

    Args:
        config: Contents of the ``config.json`` of the model.
        wanted: Requested tokens per window; None for the default.
        default: Default tokens per window.
        flag: Flag of the request, for the error.

    Raises:
        typer.BadParameter: The request exceeds the maximum length of the model.
    """
    inner = config.get("text_config")
    config = {**config, **(inner if isinstance(inner, dict) else {})}
    most = config.get(_own_name(config)) or UNBOUNDED
    if wanted is not None and wanted > most:
        raise wrong(
            flag, f"{wanted} is more than the {most} tokens of the model: give {most} or less."
        )
    return wanted or min(default, most)


def _own_name(config: dict[str, Any]) -> str:
    """Return the name of the length in this kind of model, such as ``n_positions`` of GPT-2."""
    if _LENGTH in config:
        return _LENGTH
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    return CONFIG_MAPPING[kind].attribute_map.get(_LENGTH, "") if kind in CONFIG_MAPPING else ""
