"""Access to the values of parameters, which are in memory only while they are used in large models.

``pipeline.residency`` has the implementation; for other models the functions here do nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from torch import nn

ATTRIBUTE = "_residency"  # of a model


class Part(NamedTuple):
    """Parameters that come and go together: those of a block, or of a module around the blocks.

    Attributes:
        name: Name of the module, empty for the whole model.
        is_whole: Whether parameters of modules inside belong to it.
        handle: A name for ``resident`` that stands for this part alone.
    """

    name: str
    is_whole: bool
    handle: str

    def holds(self, module: str) -> bool:
        """Whether the parameters of a module belong to the part."""
        return module == self.name or (
            self.is_whole and (not self.name or module.startswith(f"{self.name}."))
        )


WHOLE = Part("", True, "")  # a model in memory


class Residency(Protocol):
    """What loads and releases the parameters of a model."""

    def use(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Keep parameters resident; see ``resident``."""

    def parts(self) -> list[Part]:
        """Return the parts of the model, in its order."""

    def release(self) -> None:
        """Release what is not in use; see ``release``."""


def residency_of(model: nn.Module) -> Any | None:
    """Return what loads the parameters of a model; None if all of them are in memory."""
    return vars(model).get(ATTRIBUTE)


@contextmanager
def resident(model: nn.Module, *names: str) -> Iterator[None]:
    """Keep the values of parameters in memory while the context is open.

    Args:
        model: The model.
        names: Names of modules or parameters. The blocks that they lie in come with them.
    """
    residency: Residency | None = residency_of(model)
    if residency is None:
        yield
    else:
        with residency.use(names):
            yield


def release(model: nn.Module) -> None:
    """Release the values of all parameters that are not in use; they come back when they are.

    It makes room for what needs much memory and no parameters. A model in memory keeps its values.
    """
    residency: Residency | None = residency_of(model)
    if residency is not None:
        residency.release()


def iterate_parts(model: nn.Module, modules: Collection[str] | None = None) -> Iterator[Part]:
    """Iterate over the parts of a model, each in memory while it is at hand.

    A model that is in memory is one part.

    Args:
        model: The model.
        modules: Names of modules: parts that hold none of them are left out. None for all parts.
    """
    residency: Residency | None = residency_of(model)
    for part in [WHOLE] if residency is None else residency.parts():
        if modules is not None and not any(map(part.holds, modules)):
            continue
        with resident(model, part.handle):
            yield part


def around(model: nn.Module, blocks: Collection[str]) -> list[str]:
    """Return the handles of the parts that are not in blocks; none for a model in memory."""
    residency: Residency | None = residency_of(model)
    inside = tuple(f"{block}." for block in blocks)
    parts = [] if residency is None else residency.parts()
    return [part.handle for part in parts if not f"{part.name}.".startswith(inside)]
