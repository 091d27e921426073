"""A checkpoint opened again by the software it is for, and compared with the model in memory."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.export.checkpoint.files import NATIVE, read_json
from quark.torch.export.onnx.inputs import Call
from quark.torch.export.onnx.runtime import PACKAGE, Graph
from quark.torch.export.onnx.writer import FILE
from quark.torch.export.recognition import open_checkpoint
from quark.torch.graph.eval_mode import at_inference
from quark.torch.quantization.nn.layer import QuantMixin
from quark.torch.quantization.nn.packed import PackedMixin

ROWS, TOKENS = 2, 16  # of the random text that is compared on
SEED = 0
# Root mean square of the differences of log-probabilities, as a share of how far these spread:
# kernels in half precision cost 0.02 of it, scales that are twice too large 0.6, and a wrong order
# of codes, groups or offsets more than 1.
TOLERANCE = 0.25
# quant_method -> packages that Transformers loads it with, by module and distribution.
_PACKAGES = {
    "quark": {},
    "awq": {"gptqmodel": "gptqmodel"},
    "gptq": {"gptqmodel": "gptqmodel", "optimum": "optimum"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "gguf": {"gguf": "gguf"},
}
OWN = "this package"
_TEXT = ("input_ids", "attention_mask")
# Differences of the outputs of a graph as a share of how far these spread. Where floats are
# multiplied in float32, rounding costs 1e-5 at most. A value that is rounded, to codes or to half
# precision, may go either way: the median of the differences is 0.01 then, and 0.1 where the scale
# of a single layer is twice too large.
GRAPH_TOLERANCE = 1e-3  # of the largest
ROUNDED_TOLERANCE = 0.05  # of the median


class Verdict(NamedTuple):
    """What came of opening a checkpoint.

    Attributes:
        reader: What opened it.
        difference: Largest difference of the log-probabilities of tokens likelier than chance, or
            of the outputs of a graph.
        spread: Standard deviation of the log-probabilities or outputs.
        bytes: Size of its tensors on disk.
        note: Why it was not opened by other software, if so.
        compared: What was compared.
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


def verify(
    directory: str | Path, model: nn.Module, trust_remote_code: bool = False, inputs: Any = None
) -> Verdict:
    """Open a checkpoint or an ONNX file and compare its predictions with those of ``model``.

    It is opened by the software whose format it has where that is installed: Transformers with
    what it needs for the format. Otherwise, or if that fails, this package reads it, and the
    verdict says why. ONNX files are run by ONNX Runtime. A second model is in memory meanwhile.

    Args:
        directory: Directory of the checkpoint.
        model: What was exported: a causal language model of Transformers, or any model whose graph
            was exported.
        trust_remote_code: Passed to Transformers.
        inputs: What an ONNX file is run on, as ``ModelExporter.export_onnx_model`` takes it; by
            default random tokens.

    Raises:
        ImportError: ONNX Runtime is missing.
        ValueError: The predictions differ, nothing can open the checkpoint, or the model takes no
            text and there are no ``inputs``.
    """
    directory = Path(directory)
    if (directory / FILE).is_file():
        return _verify_graph(directory / FILE, model, inputs)
    ids = _random_text(model)
    expected = _log_probabilities(model, ids)
    method, packages = _method(directory)
    missing = [name for name in packages or {} if find_spec(name) is None]
    note = f"{', '.join(missing)} not installed" * bool(missing)
    if packages is None:
        note = "no other software opens it on this machine" * (method != "native")
    found, reader = None, OWN
    if not note and method != "native":
        try:
            loaded = _by_transformers(directory, method, _dtype(model), trust_remote_code)
            found = _log_probabilities(loaded, ids)
            reader = _called(["transformers", *(packages or {}).values()])
        except Exception as error:
            note = f"Transformers does not open it: {_first_line(error)}"
    if found is None:
        found = _log_probabilities(_by_ourselves(directory, trust_remote_code), ids)
    return _compare(expected, found, Verdict(reader, 0.0, 0.0, _size(directory), note))


def _compare(expected: torch.Tensor, found: torch.Tensor, verdict: Verdict) -> Verdict:
    likely = expected > -torch.tensor(float(expected.shape[-1])).log()
    errors, spread = (found - expected)[likely], float(expected.std())
    verdict = verdict._replace(difference=float(errors.abs().max()), spread=spread)
    _check(float(errors.square().mean().sqrt()) <= TOLERANCE * spread, verdict)
    return verdict


def _check(is_right: bool, verdict: Verdict) -> None:
    if not is_right:
        raise ValueError(
            f"The checkpoint does not compute what the model in memory does: {verdict}. It is not "
            "kept; export without verification to look at it."
        )


def _verify_graph(path: Path, model: nn.Module, inputs: Any) -> Verdict:
    """Run a graph and compare each of its outputs with that of the model."""
    graph = Graph(path)
    if inputs is None:
        if not {*graph.inputs} <= {*_TEXT}:
            raise ValueError(f"{path.name} takes {', '.join(graph.inputs)}: pass inputs for them.")
        ids = _random_text(model)
        inputs = {name: ids if name == _TEXT[0] else torch.ones_like(ids) for name in graph.inputs}
    call = Call.of(model, inputs)
    with at_inference(model):
        expected = call.run(model)[1]
    found = graph.run(*call.inputs.values())
    verdict = Verdict(_called([PACKAGE]), 0.0, 0.0, _size(path.parent), compared="outputs")
    rounds = any(_rounds(module) for module in model.modules())
    verdicts = [
        _compare_outputs(ours.double().cpu(), theirs.double(), rounds, verdict)
        for ours, theirs in zip(expected, found, strict=True)
    ]
    return max(verdicts, key=lambda v: v.difference)


def _compare_outputs(
    expected: torch.Tensor, found: torch.Tensor, rounds: bool, verdict: Verdict
) -> Verdict:
    if not expected.numel():
        return verdict
    errors = (found - expected).abs().masked_fill(found == expected, 0)  # infinity is itself
    finite = expected[expected.isfinite()]
    spread = float(finite.std(correction=0)) or float(finite.abs().max())
    verdict = verdict._replace(difference=float(errors.max()), spread=spread)
    typical = float(errors.median()) <= ROUNDED_TOLERANCE * spread
    _check(typical if rounds else verdict.difference <= GRAPH_TOLERANCE * spread, verdict)
    return verdict


def _rounds(module: nn.Module) -> bool:
    """Whether a module rounds what passes through it: to codes, or to half precision."""
    if any(p.is_floating_point() and p.itemsize == 2 for p in module.parameters(recurse=False)):
        return True
    if not isinstance(module, (QuantMixin, PackedMixin)):
        return False
    config = module.quant_config
    return config.input_tensors is not None or config.output_tensors is not None


def _random_text(model: nn.Module) -> torch.Tensor:
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
    return torch.randint(0, text.vocab_size, (ROWS, length), generator=generator)


@torch.no_grad()
def _log_probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return (ROWS, tokens, vocabulary) float32 on the CPU."""
    device = next(p.device for p in model.parameters() if not p.is_meta)
    was_training = model.training
    logits: torch.Tensor = model.eval()(ids.to(device), use_cache=False).logits
    model.train(was_training)
    return logits.float().cpu().log_softmax(-1)


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the type of what is not quantized."""
    kinds = (p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize > 1)
    return next(kinds, torch.float32)


def _method(directory: Path) -> tuple[str, dict[str, str] | None]:
    """Return the method of a checkpoint, and what Transformers needs for it; None for none."""
    if (directory / NATIVE).is_file():
        return "native", None
    if any(directory.glob("*.gguf")):
        return "gguf", _PACKAGES["gguf"]
    section = read_json(directory / "config.json").get("quantization_config") or {}
    method = str(section.get("quant_method"))
    return method, _PACKAGES.get(method)


def _by_transformers(
    directory: Path, method: str, dtype: torch.dtype, trust_remote_code: bool
) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    options: dict[str, Any] = {"dtype": "auto"}
    if method == "gguf":
        options = {"gguf_file": _only_gguf(directory).name, "dtype": dtype}
    shows = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    finally:
        logging.getLogger("transformers").setLevel(level)
        if shows:
            transformers_logging.enable_progress_bar()
    wrong = {what: sorted(map(str, names))[:1] for what, names in report.items() if names}
    if wrong:
        raise ValueError(str(wrong))
    loaded: nn.Module = model
    return loaded


def _by_ourselves(directory: Path, trust_remote_code: bool) -> nn.Module:
    return open_checkpoint(directory, trust_remote_code).fill()


def _only_gguf(directory: Path) -> Path:
    return next(iter(sorted(directory.glob("*.gguf"))))


def _called(packages: list[str]) -> str:
    """Return names and versions of packages."""
    names = []
    for package in packages:
        try:
            names.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            names.append(package)
    return " with ".join([names[0], ", ".join(names[1:])] if names[1:] else names)


def _size(directory: Path) -> int:
    files = (f for p in ("*.safetensors", "*.pth", "*.gguf", f"{FILE}*") for f in directory.glob(p))
    return sum(file.stat().st_size for file in files)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
