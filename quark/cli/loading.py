"""How a checkpoint is loaded and served, in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quark.cli import console

if TYPE_CHECKING:
    from quark.torch.export.containers.base import Container

SERVERS = "docs/serve.md says which server reads which scheme"


def show_loading(containers: Sequence[Container], directory: Path) -> None:
    """Print the lines that load what was written, and the commands that serve it."""
    console.out.print("\n  Load it:\n")
    console.show_code(*(container.load_code(directory) for container in containers))
    if commands := serve_commands(containers, directory):
        console.out.print(f"\n  Serve it ({SERVERS}):\n")
        console.show_code(*commands)
    console.out.print()


def serve_commands(containers: Sequence[Container], directory: Path) -> list[str]:
    """Return the commands of servers for what was written."""
    commands = (container.serve_command(directory) for container in containers)
    return [command for command in commands if command is not None]
