"""Models that verbs other than ``quark quantize`` do not take."""

import pytest


@pytest.mark.parametrize(
    "call",
    [
        ["collect", "--model_dir", "net.pt2", "--output_dir", "OUT"],
        ["search", "--model_dir", "nets:resnet", "--target_bits", 4, "--output", "OUT"],
        ["evaluate", "net.pt2"],
        ["report", "net.pt2"],
    ],
    ids=["collect", "search", "evaluate", "report"],
)
def test_graphs_are_refused_with_what_works(quark, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.pt2").touch()
    result = quark(*call)
    assert result.exit_code == 2, result.output
    message = " ".join(result.stderr.replace("\u2502", " ").split())
    assert "only 'quark quantize' takes graphs" in message
    assert not (tmp_path / "OUT").exists()
