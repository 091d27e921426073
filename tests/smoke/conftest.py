"""The command line and its model, which the tests of the command line have too."""

from tests.unit.cli.conftest import model_dir, quark, text

__all__ = ["model_dir", "quark", "text"]
