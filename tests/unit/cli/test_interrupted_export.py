"""Ctrl-C while a GGUF file is written: the earlier output stays, and nothing else is left."""

import pytest

SCHEME = ("--quant_scheme", "int4_wo_32", "--skip_evaluation", "--overwrite")


def contents(directory):
    """Bytes of the files below a directory, by name."""
    files = (f for f in directory.rglob("*") if f.is_file())
    return {str(f.relative_to(directory)): f.read_bytes() for f in files}


@pytest.mark.parametrize("has_earlier", [False, True])
def test_a_write_is_interrupted(quark, model_dir, tmp_path, monkeypatch, has_earlier):
    writer = pytest.importorskip("gguf").GGUFWriter
    write, calls, partial = writer.write_tensor_data, [], []

    def write_some(*args, **kwargs):
        calls.append(args)
        if len(calls) > 5:
            partial.extend(tmp_path.glob(".out.partial-*/*.gguf"))
            raise KeyboardInterrupt
        return write(*args, **kwargs)

    flags = ("--model_dir", model_dir, "--output_dir", tmp_path / "out", "--model_export", "gguf")
    if has_earlier:
        assert quark("quantize", *flags, *SCHEME).exit_code == 0
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_tensor_data", write_some)
        result = quark("quantize", *flags, *SCHEME)
    assert partial  # a part of the file was written
    assert result.exit_code == 130
    assert result.stderr.endswith("Interrupted. No incomplete files are left.\n")
    assert contents(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"] * has_earlier
    assert quark("quantize", *flags, *SCHEME).exit_code == 0
