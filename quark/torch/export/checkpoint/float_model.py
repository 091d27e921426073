"""Float models of a directory: every tensor of the model is read from its files."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.architecture import empty_model, model_class, read_config
from quark.torch.export.checkpoint.auto_round import AUTO_ROUND, packing_refusal
from quark.torch.export.checkpoint.build_limit import limit_build_by_size
from quark.torch.export.checkpoint.config_json import SECTION, read_config_json
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.checkpoint.header_checks import check_headers, tied_names, unused_names
from quark.torch.export.checkpoint.transformers_names import rename_for_model
from quark.torch.quantization.config.name_lookup import names_as_subject
from quark.torch.quantization.preparation import check_parameters

logger = logging.getLogger("quark")


def load_float_model(
    directory: Path,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    **options: Any,
) -> nn.Module:
    """Load a model with Transformers, in the class that its ``config.json`` names.

    The headers of safetensors are checked before anything is read. Tensors that the model does not
    use are named in a warning.

    Args:
        directory: Directory of the model. Quantized models of methods that are not in
            ``FORMATS`` are loaded too.
        dtype: Type of the parameters; ``auto`` for the stored one.
        trust_remote_code: Whether Python code of the directory may run.
        options: Passed to Transformers, such as ``attn_implementation``.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A tensor is missing, of another shape or type than the model has, or not finite;
            the files hold more layers than the model; or Transformers cannot load them.
    """
    config = check_float_model(directory, trust_remote_code)
    cls = model_class(config, directory, trust_remote_code)
    size = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
    try:
        with limit_build_by_size(size, directory):
            model, report = cls.from_pretrained(
                directory,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if first.startswith("Error no file named"):
            first = "there is no model.safetensors or pytorch_model.bin. Copy the weights there."
        raise ValueError(f"{directory}: Transformers cannot load it: {first}") from error
    _check_report(model, report, directory)
    loaded: nn.Module = model
    if not read_config_json(directory).get(SECTION):  # codes of other methods are no plain tensors
        check_parameters(loaded)
    return loaded.eval()


def check_float_model(directory: Path, trust_remote_code: bool = False) -> Any:
    """Check a model that Transformers loads as far as headers tell; return its configuration.

    Args:
        directory: Directory of the model.
        trust_remote_code: Whether Python code of the directory may run.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: The configuration is not understood, or tensors do not fit the model; or it is
            quantized by a method that Transformers does not know.
    """
    config = read_config(directory, trust_remote_code)
    section = read_config_json(directory).get(SECTION)
    if section:
        _check_method(section, directory, trust_remote_code)
    elif any(directory.glob("*.safetensors")):
        check_float_headers(directory, config, trust_remote_code)
    return config


def _check_method(section: Any, directory: Path, trust_remote_code: bool) -> None:
    """Check that Transformers knows the method of a quantized model, and can load it here.

    Otherwise it takes codes for weights. Python code of the directory may know other methods.

    Raises:
        ValueError: It does not, or software or a device is missing.
    """
    from transformers.quantizers import AutoHfQuantizer

    method = section.get("quant_method")
    if not AutoHfQuantizer.supports_quant_method(section):
        if trust_remote_code:
            return
        raise ValueError(
            f"{directory} is quantized by the method {method!r}, which neither this package nor "
            "Transformers reads. Load it with the software that wrote it."
        )
    try:
        quantizer = AutoHfQuantizer.from_config(deepcopy(section), pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:  # methods raise errors of many types
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        refusal = f" {packing_refusal(section)}" if method == AUTO_ROUND else ""
        raise ValueError(
            f"{directory} is quantized by the method {method!r}, which this package leaves to "
            f"Transformers, and it cannot load it here: {said}.{refusal}"
        ) from error


def check_float_headers(directory: Path, config: Any, trust_remote_code: bool = False) -> None:
    """Check the headers of the files of a float model against the model.

    Args:
        directory: Directory of safetensors.
        config: Configuration of the model.
        trust_remote_code: Whether Python code of the directory may run.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A tensor is missing, or of another shape or type; or the files hold more layers
            than the model.
    """
    reader = CheckpointReader(directory)
    model = empty_model(config, reader.entries, directory, trust_remote_code=trust_remote_code)
    match_headers(model, reader)


def match_headers(model: nn.Module, reader: Any) -> Any:
    """Check that files hold the tensors of a float model; return a reader with its names.

    Args:
        model: The model. Only names, shapes and types matter.
        reader: The files.

    Raises:
        ValueError: As in ``check_float_headers``.
    """
    reader = rename_for_model(reader, model)
    needed = model.state_dict()
    unused = set(unused_names(reader.entries, needed))

    def may_ignore(name: str) -> bool:
        return name in unused or _is_ignored(name, model)

    check_headers(
        reader.entries,
        needed,
        _may_be_missing(model, needed, reader.entries),
        may_ignore,
        type(model).__name__,
    )
    return reader


def report_unused(directory: Path, model: nn.Module, reader: Any) -> None:
    """Warn of tensors that files hold and a float model does not use, as if it were loaded.

    Args:
        directory: Directory of the files.
        model: The model, after ``match_headers``.
        reader: The files.
    """
    stored = rename_for_model(reader, model).entries
    names = unused_names(stored, model.state_dict())
    _warn_of_unused(directory, model, [name for name in names if not _is_ignored(name, model)])


def _is_ignored(name: str, model: nn.Module) -> bool:
    """Whether the class of a model says that it leaves out a stored tensor of this name."""
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"inv_freq$"]
    return any(re.search(pattern, name) for pattern in patterns)


def _warn_of_unused(directory: Path, model: nn.Module, names: Sequence[str]) -> None:
    if names:
        subject = names_as_subject(sorted(names))
        logger.warning("%s: %s not used by %s.", directory, subject, type(model).__name__)


def _may_be_missing(model: nn.Module, needed: Any, stored: Any) -> set[str]:
    """Return names of tensors that are not stored because others give their values."""
    optional = {name for name in needed if name.endswith(".num_batches_tracked")}
    for name, source in tied_names(model).items():
        if name in stored or source in stored:
            optional |= {name, source}
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or []
    return optional | {name for name in needed if any(re.search(p, name) for p in patterns)}


def _check_report(model: nn.Module, report: dict[str, Any], directory: Path) -> None:
    """Raise if Transformers did not read a tensor of the model; warn of those that it did not use.

    Raises:
        ValueError: A tensor is missing or does not fit.
    """
    what = f"{directory} does not fit {type(model).__name__}"
    missing = sorted(map(str, report.get("missing_keys") or ()))
    if missing:
        raise ValueError(f"{what}: {names_as_subject(missing)} missing.")
    wrong = report.get("mismatched_keys") or report.get("error_msgs")
    if wrong:
        raise ValueError(f"{what}: {next(iter(wrong))}.")
    extra = sorted(map(str, report.get("unexpected_keys") or ()))
    more = set(extra) - set(unused_names(extra, model.state_dict()))
    if more:
        raise ValueError(f"{what}: {names_as_subject(sorted(more))} unexpected.")
    _warn_of_unused(directory, model, extra)
