"""The model card: ``README.md`` beside a checkpoint, which says how it was made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark import __version__
from quark.cli import console, models
from quark.cli.loading import serve_commands
from quark.cli.quantize.request import Request
from quark.cli.quantize.tables import Outcome
from quark.cli.schemes import files_of_layer

if TYPE_CHECKING:
    from quark.torch.evaluation.predictions import Predictions
    from quark.torch.export.containers.base import Container

CARD = "README.md"
_PLACE = "path/to/this/directory"
_LICENSE = ("license", "license_name", "license_link")
_TAGS = ("quark", "quantized")
_MODULE = re.compile(r"= ((?:quark\.)?\w+)\.")  # of the line that loads a checkpoint
# File -> what writes it for its client.
_CONVERSIONS = {
    "gguf": f"quark convert {_PLACE} GGUF --to gguf  # then: llama-cli -m GGUF/model.gguf",
    "onnx": f"quark convert {_PLACE} ONNX --to onnx  # for ONNX Runtime",
}


@dataclass
class CardFacts:
    """What a card tells beside what the files themselves say.

    Attributes:
        request: The flags.
        rows: Scheme, algorithms and layers in float, in words, by title.
        calibration: Calibration data in words, or why none was needed.
        digest: Digest of the calibration data; "" without.
        letters: Shares of scripts in the calibration text, in words; "" if there is no text.
        predictions: Perplexity of the quantized model and of the original, or None.
    """

    request: Request
    rows: Mapping[str, str]
    calibration: str
    digest: str = ""
    letters: str = ""
    predictions: Predictions | None = None

    def add(self, outcome: Outcome) -> None:
        """Add the figures of a finished run."""
        self.letters = outcome.coverage.rows().get("letters calibrated", "")
        self.predictions = outcome.predictions

    def write(self, directory: Path) -> None:
        """Write the card of a checkpoint into its directory.

        The card has no times and no paths: the same run writes the same card.
        """
        text = f"---\n{self._metadata()}\n---\n\n{self._text(directory)}"
        (directory / CARD).write_text(text, encoding="utf-8", newline="\n")

    def _metadata(self) -> str:
        from huggingface_hub import ModelCardData

        is_transformers = "hf_format" in self.request.exports
        made: Any = ModelCardData(
            base_model=original_name(self.request.model_dir),
            library_name="transformers" if is_transformers else None,
            tags=[*_TAGS, (self.request.quant_scheme or self.request.recipe or "custom").lower()],
            base_model_relation="quantized",
            **_license(self.request.model_dir),
        )
        return str(made.to_yaml()).rstrip()

    def _text(self, directory: Path) -> str:
        from quark.torch.export.containers.base import get_container

        name = original_name(self.request.model_dir)
        containers = [get_container(export) for export in self.request.exports]
        code = "\n".join(c.load_code(directory) for c in containers)
        is_own = "hf_format" in self.request.exports and self.request.custom_mode == "quark"
        is_own |= "= quark." in code
        needed = "The package of Quark must be installed.\n\n" if is_own else ""
        imports = "".join(f"import {x}\n" for x in dict.fromkeys(_MODULE.findall(code)))
        return (
            f"# {name.rpartition('/')[2]}, quantized\n\n"
            f"This is {name}, quantized with Quark {__version__}.\n\n"
            f"| | |\n|---|---|\n{self._table(directory)}\n"
            f"## Load it\n\n{needed}"
            f"```python\n{imports}\n{code.replace(str(directory), _PLACE)}\n```\n"
            f"{_serving(containers, directory)}{_conversions(self.request, directory)}"
        )

    def _table(self, directory: Path) -> str:
        from quark.torch.export.containers.base import get_container
        from quark.torch.export.recognition import read_contents

        rows = {title.strip(): words for title, words in self.rows.items()}
        rows["scheme"] = place_name(rows["scheme"])
        data = self.request.dataset or ""
        rows["calibration"] = self.calibration.replace(data, place_name(data))
        rows["letters calibrated"] = self.letters
        rows["digest of the data"] = f"`{self.digest[:16]}`" if self.digest else ""
        if any(get_container(name).is_read for name in self.request.exports):
            summary = read_contents(directory).summary
            kinds = Counter(layer.scheme.weight for layer in summary.layers)
            if len(kinds) > 1:  # a recipe or flags for single layers
                rows["weights"] = ", ".join(
                    f"{words} ({n} layers)" for words, n in kinds.most_common()
                )
            rows["layers"] = f"{len(summary.layers)} quantized"
            rows["bits per weight"] = console.format_bits(summary.bits_per_weight)
        sizes = [models.weight_bytes(path) for path in (self.request.model_dir, directory)]
        rows["size"] = " → ".join(map(console.format_bytes, sizes))
        rows["perplexity"] = self._perplexity()
        return "".join(f"| {k} | {_cell(v)} |\n" for k, v in rows.items() if v)

    def _perplexity(self) -> str:
        if self.predictions is None:
            return ""
        text = place_name(self.request.eval_data) or models.EVALUATION
        return f"{console.format_perplexity(self.predictions)} on {text}"


def _serving(containers: Sequence[Container], directory: Path) -> str:
    """Return the section of the commands that serve the checkpoint; "" if there are none."""
    commands = "\n".join(serve_commands(containers, directory)).replace(str(directory), _PLACE)
    if not commands:
        return ""
    condition = "Whether a server computes this scheme depends on its release and the hardware."
    return f"\n## Serve it\n\n```bash\n{commands}\n```\n\n{condition}\n"


def _conversions(request: Request, directory: Path) -> str:
    """Return the section of the commands that convert a checkpoint for other clients."""
    from quark.torch.export.recognition import read_contents

    if "hf_format" not in request.exports or request.export_weight_format != "real_quantized":
        return ""
    schemes = [group.scheme for group in read_contents(directory).summary.schemes()]
    holders = [files_of_layer(scheme.weight, scheme.input) for scheme in schemes]
    both = set.intersection(*holders) if holders else set()
    lines = [line for name, line in _CONVERSIONS.items() if name in both - {*request.exports}]
    if not lines:
        return ""
    condition = "A conversion keeps codes and scales, or names what the other file cannot hold."
    return f"\n## Convert it\n\n```bash\n{chr(10).join(lines)}\n```\n\n{condition}\n"


def original_name(path: Path) -> str:
    """Return the name of a model by its place: a name of the Hub, or that of its directory.

    The Hub's cache keeps ``org/name`` in ``models--org--name/snapshots/REVISION``.
    """
    path = path.resolve()
    above = path.parents
    if len(above) > 1 and above[0].name == "snapshots" and above[1].name.startswith("models--"):
        return above[1].name.removeprefix("models--").replace("--", "/")
    return path.stem if path.is_file() else path.name


def _license(source: Path) -> dict[str, Any]:
    """Return what the card of the original says of its licence."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    card = source / CARD
    if not card.is_file():
        return {}
    try:
        metadata = metadata_load(card) or {}
    except (ValueError, OSError, YAMLError, RecursionError):
        return {}  # somebody's text, which need not be a card
    return {name: metadata[name] for name in _LICENSE if isinstance(metadata.get(name), str)}


def place_name(source: str | None) -> str:
    """Return the name of a file or directory without its path, and names of data sets whole.

    Example: ``pileval:0.7,texts/my.txt:0.3`` is ``pileval:0.7,my.txt:0.3``.
    """
    from quark.torch.evaluation.datasets import split_shares

    if not source:
        return ""
    shares = split_shares(source)
    if len(shares) > 1:
        return ",".join(f"{place_name(name)}:{share:g}" for name, share in shares)
    return Path(source).name if Path(source).exists() else source


def _cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
