"""The table of ``quark schemes`` is the one that the schemes make."""

import json
from runpy import run_path

from quark.cli import schemes
from quark.torch.quantization.config.presets import KV_CACHE_SCHEMES, scheme_names

SCRIPT = "scripts/scheme_table.py"


def test_the_table_is_that_of_the_schemes(request):
    script = run_path(str(request.config.rootpath / SCRIPT))
    written = schemes.TABLE.read_text(encoding="utf-8")
    assert written == script["table"](), f"run python {SCRIPT}"
    rows = json.loads(written)
    assert {row["name"] for row in rows["quant_scheme"]} == set(scheme_names())
    assert [row["name"] for row in rows["kv_cache_dtype"]] == list(KV_CACHE_SCHEMES)
