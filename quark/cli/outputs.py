"""Checks of the directories and files that a verb will write, before any work."""

from __future__ import annotations

from pathlib import Path

from quark.cli.console import wrong


def check_directory(flag: str, directory: Path, overwrite: bool) -> None:
    """Check that a directory can be written.

    Raises:
        typer.BadParameter: It is in use, holds files of the user, or cannot be written.
    """
    from quark.torch.files import check_vacant

    try:
        check_vacant(directory, overwrite)
    except OSError as error:
        message = str(error).replace("pass overwrite=True", "give --overwrite")
        raise wrong(flag, message) from None


def check_room(flag: str, directory: Path, needed: int) -> None:
    """Check that the disk of a directory has room.

    Args:
        flag: Flag of the directory, for the error.
        directory: The directory.
        needed: Bytes that will be written.

    Raises:
        OSError: There is less. The same call is right when there is room.
    """
    from quark.torch.files import check_space

    try:
        check_space(directory, needed)
    except OSError as error:
        raise OSError(f"{flag}: {error}") from None


def check_offload_directory(directory: Path) -> None:
    """Check that the directory of ``--offload_dir`` can be written.

    Raises:
        typer.BadParameter: It cannot.
    """
    from quark.torch.pipeline.activation_store import offload_directory

    try:
        with offload_directory(directory):
            pass
    except OSError as error:
        raise wrong("--offload_dir", str(error).removeprefix("offload_dir: ")) from None


def check_file(flag: str, path: Path, overwrite: bool) -> None:
    """Check that a file can be written.

    Raises:
        typer.BadParameter: It exists, or its directory does not, or cannot be written.
    """
    from quark.torch.files import check_new_file

    try:
        check_new_file(path, overwrite)
    except OSError as error:
        raise wrong(flag, str(error)) from None


def check_page(output: Path, overwrite: bool) -> None:
    """Check that a page and, beside it, its numbers can be written.

    Raises:
        typer.BadParameter: A file exists, or the directory does not.
    """
    if output.suffix == ".json":
        raise wrong("--output", f"{output} would hold the numbers. Name an .html file.")
    for path in (output, output.with_suffix(".json")):
        check_file("--output", path, overwrite)
