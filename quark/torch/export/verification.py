"""Verification: a written checkpoint is opened by the software that it is for, and compared."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from quark.torch.export.checkpoint.architecture import model_class, read_config
from quark.torch.export.checkpoint.config_json import SECTION, read_config_json
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.graph.trace import iter_tensors
from quark.torch.quantization.graph_mode.inputs import example_arguments
from quark.torch.quantization.nn.layer import QuantizedLayer

logger = logging.getLogger(__name__)

ROWS, TOKENS = 2, 16  # of the random text that predictions are compared on
SEED = 0
# Root mean square of the differences of log-probabilities, as a share of their spread: kernels in
# half precision cost 0.02, scales that are twice too large 0.6, and a wrong order of codes, groups
# or offsets more than 1.
TOLERANCE = 0.25
OWN = "this package"
INPUT_QUANTIZERS = {"_input_quantizer", "input_quantizer"}  # of fake-quantized and packed layers


class Verdict(NamedTuple):
    """Result of a verification.

    Attributes:
        reader: Name and version of the software that opened the checkpoint.
        difference: Largest difference of the log-probabilities of tokens likelier than chance, or
            of the outputs of a graph.
        spread: Standard deviation of the log-probabilities or outputs.
        bytes: Size of the files with weights.
        note: Reason why other software did not open it, if so.
        compared: Quantity that was compared.
    """

    reader: str
    difference: float
    spread: float
    bytes: int
    note: str = ""
    compared: str = "log-probabilities"

    def __str__(self) -> str:
        text = f"opened by {self.reader}: {self.compared} differ by up to {self.difference:.1e}"
        text += f" in a spread of {self.spread:.1f}, {self.bytes / 1e6:.1f} MB"
        return text + (f" ({self.note})" if self.note else "")


def verify_predictions(
    path: Path,
    model: nn.Module,
    packages: Mapping[str, str] | None,
    size: int,
    load: Callable[[], nn.Module],
    trust_remote_code: bool,
    is_dequantized: bool = False,
) -> Verdict:
    """Compare the predictions of a checkpoint in Transformers with those of ``model``.

    Where Transformers does not load the checkpoint, this package does, and the verdict says why.

    Args:
        path: Directory of the checkpoint, or a GGUF file.
        model: A causal language model of Transformers.
        packages: Modules -> distributions that Transformers needs to load it; None if not every
            machine can load it.
        size: Bytes of its files with weights.
        load: Loads it with this package.
        trust_remote_code: Passed to Transformers.
        is_dequantized: Whether Transformers dequantizes the weights and leaves inputs in float;
            ``model`` then does the latter too.

    Raises:
        ValueError: The predictions differ, nothing opens the checkpoint, or the model takes no
            text.
    """
    ids = random_text(model)
    missing = [name for name in packages or {} if find_spec(name) is None]
    if packages is None:
        note = "no other software opens it on this machine"
    elif missing:
        note = f"{', '.join(missing)} not installed"
    else:
        try:
            loaded = _load_with_transformers(path, _dtype(model), trust_remote_code, is_dequantized)
            actual = _log_probabilities(loaded, ids)
        except Exception as error:
            note = f"Transformers does not open it: {_first_line(error)}"
        else:
            reader = package_names(["transformers", *packages.values()])
            note = "weights alone: it leaves inputs in float on a CPU" if is_dequantized else ""
            with float_inputs(model) if is_dequantized else nullcontext():
                expected = _log_probabilities(model, ids)
            return _compare(expected, actual, Verdict(reader, 0.0, 0.0, size, note))
    return verify_own(model, size, load, note)


def verify_own(
    model: nn.Module, size: int, load: Callable[[], nn.Module], note: str = ""
) -> Verdict:
    """Compare the predictions of a checkpoint that this package loads with those of ``model``.

    A warning says what was not verified, if the checkpoint is for other software.

    Args:
        model: A causal language model of Transformers.
        size: Bytes of the files with weights.
        load: Loads the checkpoint.
        note: Reason why other software did not open it.

    Raises:
        ValueError: The predictions differ, the checkpoint is damaged, or the model takes no text.
    """
    ids = random_text(model)
    expected = _log_probabilities(model, ids)
    verdict = _compare(expected, _log_probabilities(load(), ids), Verdict(OWN, 0, 0, size, note))
    if note:
        logger.warning(
            "Verified: this package reads the checkpoint, and it computes what the model in memory "
            "does. Not verified: that other software opens it (%s).",
            note,
        )
    return verdict


@torch.no_grad()
def verify_graph_tensors(model: fx.GraphModule, loaded: fx.GraphModule, size: int) -> Verdict:
    """Compare the outputs of a graph that was read from a checkpoint with those of ``model``.

    Args:
        model: The graph that was written.
        loaded: The same graph with the tensors of the checkpoint.
        size: Bytes of the files with weights.

    Raises:
        ValueError: The outputs differ in a bit.
    """
    args, kwargs = example_arguments(model, None)
    pairs = list(
        zip(
            iter_tensors(model(*args, **kwargs)), iter_tensors(loaded(*args, **kwargs)), strict=True
        )
    )
    agrees = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    errors = [float((theirs.double() - ours.double()).abs().max()) for ours, theirs in pairs]
    spreads = [float(ours.double().std(correction=0)) for ours, _ in pairs]
    verdict = Verdict(OWN, max(errors), max(spreads), size, compared="outputs")
    check_agreement(agrees, verdict)
    return verdict


def _compare(expected: torch.Tensor, actual: torch.Tensor, verdict: Verdict) -> Verdict:
    likely = (
        expected > -torch.tensor(float(expected.shape[-1]), dtype=torch.float32, device="cpu").log()
    )
    errors, spread = (actual - expected)[likely], float(expected.std())
    verdict = verdict._replace(difference=float(errors.abs().max()), spread=spread)
    check_agreement(float(errors.square().mean().sqrt()) <= TOLERANCE * spread, verdict)
    return verdict


def check_agreement(agrees: bool, verdict: Verdict) -> None:
    """Raise unless a checkpoint and its model agree.

    Raises:
        ValueError: They do not.
    """
    if not agrees:
        raise ValueError(
            f"The checkpoint does not compute what the model in memory does: {verdict}. It is not "
            "kept; export without verification to look at it."
        )


def random_text(model: nn.Module) -> torch.Tensor:
    """Return tokens, (ROWS, TOKENS) or as many as the model takes."""
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else None
    if not hasattr(text, "vocab_size"):
        raise ValueError(
            "Only language models of Transformers can be verified on random text: "
            f"{type(model).__name__} has no config with a vocab_size."
        )
    length = min(TOKENS, getattr(text, "max_position_embeddings", None) or TOKENS)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, text.vocab_size, (ROWS, length), generator=generator, device="cpu")


@torch.no_grad()
def _log_probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return (ROWS, tokens, vocabulary) float32 on the CPU."""
    device = next(p.device for p in model.parameters() if not p.is_meta)
    was_training = model.training
    logits: torch.Tensor = model.eval()(ids.to(device), use_cache=False).logits
    model.train(was_training)
    return logits.float().cpu().log_softmax(-1)


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the type of the parameters that are not quantized."""
    kinds = (p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize > 1)
    return next(kinds, torch.float32)


@contextmanager
def float_inputs(model: nn.Module) -> Iterator[None]:
    """Leave the inputs of all layers in float while the context is open."""
    held = [
        (layer, name, layer._modules[name])
        for layer in model.modules()
        if isinstance(layer, QuantizedLayer)
        for name in INPUT_QUANTIZERS & layer._modules.keys()
    ]
    for layer, name, _ in held:
        layer._modules[name] = None
    try:
        yield
    finally:
        for layer, name, quantizer in held:
            layer._modules[name] = quantizer


def _load_with_transformers(
    path: Path, dtype: torch.dtype, trust_remote_code: bool, is_dequantized: bool
) -> nn.Module:
    """Load a directory or a GGUF file, and dequantize its weights if that is said.

    Raises:
        ValueError: Weights are missing, or left over.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    options: dict[str, Any] = {"dtype": "auto"}
    if path.is_file():
        cls, options = AutoModelForCausalLM, {"gguf_file": path.name, "dtype": dtype}
    else:
        config = read_config(path, trust_remote_code)
        cls = model_class(config, path, trust_remote_code)
        if is_dequantized:  # where there is a GPU, too
            config.quantization_config = read_config_json(path)[SECTION] | {"dequantize": True}
            options["config"] = config
    shows = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        model, report = cls.from_pretrained(
            path.parent if path.is_file() else path,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    finally:
        logging.getLogger("transformers").setLevel(level)
        if shows:
            transformers_logging.enable_progress_bar()
    if path.is_dir():
        _add_rotations(model, path, report)
    wrong = {kind: sorted(map(str, names))[:1] for kind, names in report.items() if names}
    if wrong:
        raise ValueError(str(wrong))
    loaded: nn.Module = model
    return loaded


def _add_rotations(model: nn.Module, path: Path, report: dict[str, Any]) -> None:
    """Add the rotations of inputs that compressed-tensors stores, and Transformers leaves out.

    Args:
        model: The loaded model.
        path: Directory of the checkpoint.
        report: Report of the loading; tensors of rotations are removed from its unexpected keys.
    """
    section = (read_config_json(path).get(SECTION) or {}).get("transform_config")
    if not section:
        return
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    apply_transform_config(model, TransformConfig(**section))
    reader = CheckpointReader(path)
    rotations = {name: reader.tensor(name) for name in report["unexpected_keys"]}
    report["unexpected_keys"] = model.load_state_dict(rotations, strict=False).unexpected_keys


def package_names(packages: list[str]) -> str:
    """Return names and versions of packages: the first "with" the others."""
    names = []
    for package in packages:
        try:
            names.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            names.append(package)
    return " with ".join([names[0], ", ".join(names[1:])] if names[1:] else names)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
