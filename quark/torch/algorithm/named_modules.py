"""Names of modules in options of algorithms."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterable

from quark.torch.pipeline.context import Context
from quark.torch.quantization.config.name_lookup import nearest

logger = logging.getLogger(__name__)

Match = Callable[[str, str], bool]  # takes the full name of a module, and a name of the options


def has_end(name: str, end: str) -> bool:
    """Whether the last parts of a name are ``end``: ``mlp.up_proj`` of ``layers.0.mlp.up_proj``."""
    return f".{name}".endswith(f".{end}")


def has_part(name: str, part: str) -> bool:
    """Whether a name contains ``part``."""
    return part in name


def fits_pattern(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern, as in ``fnmatch``."""
    return fnmatch.fnmatchcase(name, pattern)


def warn_of_names(context: Context, what: str, names: Iterable[str], matches: Match) -> None:
    """Warn of each name that matches no module of the model, quantized or not.

    Files list the layers of an architecture, and a model may lack some of them.

    Args:
        context: The model.
        what: Algorithm and option, for the message.
        names: Names in the option.
        matches: How they are compared with names of modules.
    """
    modules = [name for name, _ in context.model.named_modules() if name]
    for given in names:
        if any(matches(name, given) for name in modules):
            continue
        near = nearest(given.strip("*").rpartition(".")[2], {n.rpartition(".")[2] for n in modules})
        hint = f" Nearest: {', '.join(near)}." if near else ""
        logger.warning("%s has %r, which matches no module of the model.%s", what, given, hint)
