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


def test_the_short_list_and_all(quark):
    short, everything = quark("schemes").stdout, quark("schemes", "--all").stdout
    assert set(schemes.COMMON) <= set(scheme_names())
    shown = {line.split()[0] for line in short.splitlines() if line.strip()}
    assert set(schemes.COMMON) <= shown
    assert "int4_fp8" not in short
    assert set(scheme_names()) <= {x.split()[0] for x in everything.splitlines() if x.strip()}
    row = next(line for line in short.splitlines() if line.split()[:1] == ["uint4_wo_128"])
    assert row.split()[1] == "4.28"
    assert row.split()[6:8] == ["awq,", "gptq,"]
    rows = {
        row["name"]: row for row in json.loads(quark("schemes", "--json").stdout)["quant_scheme"]
    }
    assert rows["ptpc_fp8"]["bits"] == 8 + 32 / 1024
    assert rows["fp8"]["layouts"] == ["quark", "compressed-tensors", "fp8", "modelopt"]
    assert rows["q4_k"]["gguf"] == {"type": "Q4_K", "bits": 4.5}
    assert [rows[name]["gguf"] for name in ("int4_wo_128", "nvfp4", "fp8")] == [
        {"type": "Q4_0", "bits": 4.5},
        None,
        None,
    ]
    assert rows["int4_wo_128"]["onnx"] and not rows["q4_k"]["onnx"]
    row = next(line for line in short.splitlines() if line.split()[:1] == ["q4_k"])
    assert row.split()[1] == "4.50" and row.split()[-1] == "gguf"
    assert "gguf (4.5 bits)" in schemes._other_files(rows["int2_wo_64"])
    assert f"{len(scheme_names()) - len(schemes.COMMON)} other schemes" in short


def test_a_part_of_a_name(quark):
    tables = json.loads(quark("schemes", "FP8", "--json").stdout)
    names = [row["name"] for rows in tables.values() for row in rows]
    assert "ptpc_fp8" in names and all("fp8" in name for name in names)
    said = quark("schemes", "int4_wo_3").stdout
    assert "uint4_wo_32" in said and "fp8" not in said and "--kv_cache_dtype" not in said
