"""Quark: post-training quantization of PyTorch models."""

from pathlib import Path as _Path

__version__ = "1.0.0.dev0"


def _refuse_mixed_files(package: _Path) -> None:
    """Refuse a directory into which pip has installed two packages called ``quark``.

    pip lets each overwrite files of the other without a word.

    Args:
        package: The directory of this package.

    Raises:
        ImportError: Files of AMD Quark, or of another ``quark``, lie between those of this package.
    """
    place = package.parent
    names = sorted(p.name for p in place.iterdir()) if place.is_dir() else []  # not in an archive
    others = [
        "-".join(name.removesuffix(".dist-info").split("-")[:2])
        for name in names
        if name.endswith(".dist-info") and name.split("-")[0].lower() in ("amd_quark", "quark")
    ]
    if others:
        installed = " ".join(other.rpartition("-")[0].replace("_", "-") for other in others)
        raise ImportError(
            f"{place} holds quark-quantizer {__version__} and {' and '.join(others)}: both provide "
            "the import package quark, and their files are mixed. Uninstall both (pip uninstall "
            f"{installed} quark-quantizer), then install one of them, or use two environments."
        )


_refuse_mixed_files(_Path(__file__).parent)
