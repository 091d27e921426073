"""Names of modules in options of algorithms. A name that matches no module would act silently."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator

from quark.torch.pipeline.context import Context
from quark.torch.quantization.config.name_lookup import nearest

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


def check_names(context: Context, what: str, names: Iterable[str], matches: Match) -> None:
    """Check that each name matches a module of the model, quantized or not.

    Args:
        context: The model.
        what: Algorithm and option, for the message.
        names: Names in the option.
        matches: How they are compared with names of modules.

    Raises:
        ValueError: A name matches no module; the message has the nearest names.
    """
    for problem in unmatched_names(context, names, matches):
        raise ValueError(f"{what} has {problem} Correct the name, or leave it out.")


def unmatched_names(context: Context, names: Iterable[str], matches: Match) -> Iterator[str]:
    """Iterate over descriptions of the names that match no module of the model."""
    modules = [name for name, _ in context.model.named_modules() if name]
    for given in names:
        if any(matches(name, given) for name in modules):
            continue
        near = nearest(given.strip("*").rpartition(".")[2], {n.rpartition(".")[2] for n in modules})
        hint = f" Nearest: {', '.join(near)}." if near else ""
        yield f"{given!r}, which matches no module of the model.{hint}"
