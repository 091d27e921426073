"""The Hugging Face Hub: upload of results, and headers of the models there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quark import __version__
from quark.cli import console
from quark.cli.console import stage, wrong

_FLAG = "--push_to_hub"


def check_repository_name(name: str) -> None:
    """Check that a name can be that of a repository.

    Raises:
        typer.BadParameter: It cannot.
    """
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except ValueError:
        raise wrong(
            _FLAG,
            f"{name!r} cannot be the name of a repository. Give NAME or OWNER/NAME, of letters, "
            "digits, '-', '_' and '.'.",
        ) from None


def check_upload(name: str) -> None:
    """Check that a repository can be written, before the work whose result it will hold.

    Raises:
        typer.BadParameter: The name cannot be that of a repository, there is no token, or the
            token may not write there.
    """
    from huggingface_hub import HfApi, constants, get_token, is_offline_mode

    check_repository_name(name)
    if is_offline_mode():
        raise wrong(_FLAG, "HF_HUB_OFFLINE is set. Unset it, or leave this out.")
    if get_token() is None:
        raise wrong(
            _FLAG, "there is no token of the Hub. Run 'hf auth login', or set HF_TOKEN to one."
        )
    try:
        account = HfApi().whoami()
    except Exception as error:  # the network library of huggingface_hub depends on its version
        raise wrong(
            _FLAG,
            f"{constants.ENDPOINT} does not accept the token, or cannot be reached "
            f"({_first_line(error)}). Run 'hf auth login', or leave this out.",
        ) from None
    _check_owner(name, account)


def _check_owner(name: str, account: Mapping[str, Any]) -> None:
    owner = name.rpartition("/")[0]
    owners = [account["name"], *(group["name"] for group in account.get("orgs", ()))]
    if owner and owner not in owners:
        raise wrong(
            _FLAG, f"the token is that of {', '.join(owners)}, not of {owner}. Give {owners[0]}/…."
        )
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise wrong(_FLAG, "the token may read only. Create one that may write.")


def upload(directory: Path, name: str, private: bool) -> str:
    """Upload a directory to a repository, which is created if it does not exist.

    Args:
        directory: A complete output.
        name: Name of the repository.
        private: Whether a new repository is private.

    Returns:
        The address of the repository.

    Raises:
        OSError: The upload failed; the directory is as before.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with stage(f"uploading to {name}"):
            repository = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repository.repo_id,
                folder_path=directory,
                commit_message=f"Model quantized with Quark {__version__}",
            )
    except Exception as error:  # the network library of huggingface_hub depends on its version
        raise OSError(
            f"{directory} is complete, but its upload failed: {_first_line(error)} "
            f"Upload it with 'hf upload {name} {directory}'."
        ) from error
    console.out.print(f"  uploaded: {repository}", soft_wrap=True)
    return str(repository)


@contextmanager
def headers_of(name: str, flag: str) -> Iterator[Path]:
    """Yield a temporary directory with the headers of a model on the Hub.

    It has the JSON files of the model. Files of tensors have their headers alone: zeros, which take
    no room on most file systems, stand for the tensors.

    Args:
        name: OWNER/NAME.
        flag: Flag of the value, for the error.

    Raises:
        typer.BadParameter: There is no such model, or it has no safetensors.
    """
    import huggingface_hub
    from huggingface_hub import HfApi

    with TemporaryDirectory() as place:
        try:
            with stage(f"reading headers of {name}"):
                described = huggingface_hub.snapshot_download(name, allow_patterns=["*.json"])
                files = HfApi().get_safetensors_metadata(name).files_metadata
        except Exception as error:  # the network library of huggingface_hub depends on its version
            raise wrong(
                flag,
                f"there is no {name} here, and the headers of no such model can be read on the "
                f"Hugging Face Hub ({_first_line(error)}). Give the directory of a checkpoint.",
            ) from None
        directory = Path(place)
        for file in Path(described).glob("*.json"):
            shutil.copyfile(file, directory / file.name)
        for file_name, metadata in files.items():
            _write_header(directory / Path(file_name).name, metadata)
        yield directory


def _write_header(path: Path, metadata: Any) -> None:
    """Write a file of safetensors whose tensors are zero."""
    tensors = {name: vars(info) for name, info in metadata.tensors.items()}
    header: dict[str, Any] = {name: tensors[name] for name in tensors}
    if metadata.metadata:
        header["__metadata__"] = metadata.metadata
    text = json.dumps(header).encode()
    end = max((info["data_offsets"][1] for info in tensors.values()), default=0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
