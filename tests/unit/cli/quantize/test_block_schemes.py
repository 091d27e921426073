"""``quark quantize`` by the schemes of ggml's blocks."""

import pytest
from safetensors.torch import load_file

from quark.demo.text import model_directory

gguf = pytest.importorskip("gguf")


@pytest.fixture
def run(quark, model_dir, tmp_path):
    def run(scheme, *flags):
        result = quark(
            *("quantize", "--model_dir", model_dir, "--output_dir", tmp_path / "out"),
            *("--skip_evaluation", "--quant_scheme", scheme, *flags),
        )
        assert result.exit_code == 0, result.output
        return result.output, tmp_path / "out"

    return run


def test_layers_without_super_blocks_are_named_before_the_work(run):
    output, folder = run("q4_k", "--model_export", "gguf")
    assert "Super-blocks of 256 inputs do not divide" in output.replace("\n", " ")
    assert output.index("Super-blocks") < output.index("loading the model")
    (path,) = folder.glob("*.gguf")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_down.weight"] == kinds["blk.0.attn_q.weight"] == "Q5_0"


def test_own_checkpoints_become_the_same_file_and_come_back(quark, tmp_path):
    """The shipped model has 256 hidden values: its layers have super-blocks."""
    for place, flags in (("own", ()), ("direct", ("--model_export", "gguf"))):
        result = quark(
            *("quantize", "--model_dir", model_directory(), "--output_dir", tmp_path / place),
            *("--skip_evaluation", "--quant_scheme", "q4_k", *flags),
        )
        assert result.exit_code == 0, result.output
    for source, target, kind in (("own", "gguf", "gguf"), ("gguf", "again", "quark")):
        result = quark("convert", tmp_path / source, tmp_path / target, "--to", kind)
        assert result.exit_code == 0, result.output
    one, two = (
        {t.name: t for t in gguf.GGUFReader(next((tmp_path / place).glob("*.gguf"))).tensors}
        for place in ("direct", "gguf")
    )
    assert one["blk.3.ffn_up.weight"].tensor_type.name == "Q4_K"
    for name, tensor in one.items():
        read = gguf.dequantize(two[name].data, two[name].tensor_type)
        assert (read == gguf.dequantize(tensor.data, tensor.tensor_type)).all(), name
    own, again = (load_file(tmp_path / n / "model.safetensors") for n in ("own", "again"))
    assert own.keys() == again.keys()
    assert all(own[name].equal(again[name]) for name in own)
