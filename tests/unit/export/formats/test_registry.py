"""The table of checkpoint formats."""

import pytest

from quark.torch.export.formats.base import FORMATS, ExportFormat, get_format
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_loads(name):
    made = get_format(name, Config(), JsonExporterConfig())
    assert isinstance(made, ExportFormat)


def test_unknown_format_names_the_nearest():
    with pytest.raises(ValueError, match=r"custom_mode: 'quack' is unknown\. Did you mean 'quark'"):
        get_format("quack", Config(), JsonExporterConfig())
