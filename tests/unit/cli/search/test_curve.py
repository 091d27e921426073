"""The windows of text that ``quark search`` measures mixtures on."""

import json

import pytest

from quark.torch.evaluation.predictions import Reference
from quark.torch.search.loss_curve import WINDOWS


def test_the_curve_is_measured_on_a_few_windows(quark, model_dir, text, tmp_path, monkeypatch):
    """The mixture and one format for all layers are measured on all windows."""
    counts, compare = {}, Reference.compare

    def note(reference, model, windows, *args, title, **options):
        counts.setdefault(title, set()).add(len(windows))
        return compare(reference, model, windows, *args, title=title, **options)

    monkeypatch.setattr(Reference, "compare", note)
    result = quark(
        *("search", "--model_dir", model_dir, "--output", tmp_path / "mixed.json", "--json"),
        *("--formats", "int2_wo_32,int4_wo_32,int8_wo", "--target_bits", 5.5, "--seq_len", 32),
        *("--dataset", text, "--num_calib_data", 4),
        *("--eval_data", text, "--num_eval_data", WINDOWS + 3),
    )
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["sizes"]}
    measured = {name for name, row in rows.items() if row["divergence"] is not None}
    assert "mixed" in measured and len(measured) == 2
    on_all = {title for title, found in counts.items() if found == {WINDOWS + 3}}
    assert on_all == {"the mixture", *measured - {"mixed"}}
    assert {count for title in counts.keys() - on_all for count in counts[title]} == {WINDOWS}
    assert rows["mixed"]["loss"] == pytest.approx(rows["mixed"]["divergence"], rel=1e-6)
    (other,) = measured - {"mixed"}
    assert rows[other]["loss"] == pytest.approx(rows[other]["divergence"], rel=0.5)
