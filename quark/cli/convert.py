"""``quark convert``: write a checkpoint in another format, with the same codes and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from quark.cli import console, models
from quark.cli.hub import check_upload, upload
from quark.cli.loading import show_loading
from quark.cli.model_files import check_quantized, find_model
from quark.cli.options import CheckDigests, Json, TrustRemoteCode, add_verb, in_words, one_of, panel
from quark.cli.other_names import TARGETS
from quark.cli.outputs import check_directory
from quark.torch.export.containers.registry import conversion_targets

HELP = """
Write a quantized checkpoint in the format of another tool, with the same codes and scales.

Nothing is quantized again. If the other format cannot hold a layer, an error names the layer before
any tensor is read. The input is a checkpoint in one of the formats of [cyan]--to[/cyan], of any
version, MXFP4 of gpt-oss, the native format, or a GGUF file with Q4_0 to Q8_0, K-quants, IQ4_NL,
MXFP4 or NVFP4 weights.

[bold]Examples[/bold]

    [cyan]quark convert llama-awq llama-ct --to compressed-tensors --verify[/cyan]

    [cyan]quark convert llama-gptq llama-gguf --to gguf[/cyan]

    [cyan]quark convert llama.gguf llama-int4 --to quark[/cyan]
"""

_output = panel("Output")
Source = Annotated[
    Path,
    typer.Argument(metavar="IN", help="Directory of a checkpoint, a GGUF file, or OWNER/NAME."),
]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write.")]
To = Annotated[
    str,
    _output(
        "--to",
        metavar="FORMAT",
        **one_of("--to", conversion_targets, meant=TARGETS),
        help=f"Format to write: {in_words(conversion_targets())}.",
    ),
]
Verify = Annotated[
    bool,
    _output(
        "--verify",
        help="Open the result with the target software, if it is installed, and compare its "
        "predictions with the source. Otherwise this package opens it, and a warning says why. A "
        "result that differs is not kept.",
    ),
]
Overwrite = Annotated[
    bool, _output("--overwrite", help="Replace the output directory if it exists.")
]
PushToHub = Annotated[
    str | None,
    _output(
        "--push_to_hub", metavar="NAME", help="Upload the result to this repository of the Hub."
    ),
]
Private = Annotated[bool, _output("--private", help="Create that repository as a private one.")]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "convert", convert, HELP)


def convert(
    source: Source,
    target: Target,
    to: To,
    verify: Verify = False,
    overwrite: Overwrite = False,
    push_to_hub: PushToHub = None,
    private: Private = False,
    trust_remote_code: TrustRemoteCode = False,
    check_digests: CheckDigests = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint and print the result."""
    console.show_json_only(as_json)
    source = find_model(source, "IN")
    if not source.exists():
        raise console.wrong("IN", f"there is no {source}. Give a checkpoint's directory or file.")
    from quark.torch.export.conversion import check_apart, check_kinds
    from quark.torch.export.conversion import convert as write
    from quark.torch.export.recognition import recognize_container

    with console.blaming("OUT"):
        check_apart(source, target)
    check_directory("OUT", target, overwrite)
    if private and push_to_hub is None:
        raise console.wrong("--private", "needs --push_to_hub.")
    if push_to_hub is not None:
        check_upload(push_to_hub)
    check_quantized(source, "IN")
    with console.blaming("--to"):
        check_kinds(source, to)
    with console.stage(f"writing {to}"):
        verdict = write(source, target, to, overwrite, verify, trust_remote_code, check_digests)
    before = models.weight_bytes(source)
    after = models.weight_bytes(target)
    rows = {"checkpoint": escape(str(target)), "format": to}
    rows["size on disk"] = f"{console.format_bytes(before)} → {console.format_bytes(after)}"
    if verdict is not None:
        rows["verified"] = escape(str(verdict))
    console.out.print("", console.facts(rows), sep="\n")
    show_loading([recognize_container(target)], target)
    if push_to_hub is not None:
        upload(target, push_to_hub, private)
    if as_json:
        written = {"output": str(target), "format": to, "bytes": after, "original_bytes": before}
        console.as_json({**written, "verified": None if verdict is None else str(verdict)})
