"""Checkpoints of gptqmodel: options of single layers, and files that contradict themselves."""

import pytest
import torch

from quark.torch.export.recognition import load_checkpoint, load_in_float
from tests.unit.export.formats.gptq_files import set_section, set_tensors, write

LAYER = "model.layers.1.mlp.up_proj"
V1 = {
    **{"bits": 4, "checkpoint_format": "gptq", "desc_act": False, "group_size": 32, "sym": True},
    "quant_method": "gptq",
}
V2 = {**V1, "checkpoint_format": "gptq_v2", "sym": False}
DYNAMIC = {
    r"+:.*\.v_proj.*": {"bits": 8, "group_size": 64, "desc_act": False, "mse": 2.4},
    r"-:.*layers\.1\.mlp\.down_proj.*": {},
    r"model\.layers\.0\.mlp\.up_proj": {"bits": 2, "sym": False},
    r".*down_proj.*": {"bits": 3},
}


def by_dynamic(name):
    """The scheme that ``DYNAMIC`` gives a layer."""
    if name.endswith("v_proj"):
        return 8, 64, True
    if name == "model.layers.1.mlp.down_proj":
        return None
    if name == "model.layers.0.mlp.up_proj":
        return 2, 32, False
    return (3, 32, True) if name.endswith("down_proj") else (4, 32, True)


@pytest.fixture
def usual(build, tmp_path):
    """A checkpoint with zero points in the middle, and its values."""
    return write(build(), tmp_path, lambda name: (4, 32, True), V1, 1), tmp_path


def check_values(path, values):
    state = load_in_float(path).state_dict()
    assert all(state[name].equal(value) for name, value in values.items())


class TestOptionsOfLayers:
    def test_values(self, build, tmp_path):
        section = {**V2, "sym": True, "dynamic": DYNAMIC}
        check_values(tmp_path, write(build(), tmp_path, by_dynamic, section, 0))

    def test_logits(self, build, logits, tmp_path):
        write(build(), tmp_path, by_dynamic, {**V2, "sym": True, "dynamic": DYNAMIC}, 0)
        expected, found = logits(load_in_float(tmp_path)), logits(load_checkpoint(tmp_path))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        ("dynamic", "said"),
        [
            ({"+:.*v_proj.*": {"pack_dtype": "int8"}}, "has pack_dtype, which is not supported"),
            ({"+:.*v_proj.*": {"bits": 5}}, "bits=5 is not supported"),
            ({"-:.*(v_proj|k_proj)": {}}, "list the layers by their full names"),
            ([1], "malformed"),
        ],
    )
    def test_refused(self, usual, dynamic, said):
        set_section(usual[1], {**V1, "dynamic": dynamic})
        with pytest.raises(ValueError, match=said):
            load_checkpoint(usual[1])


class TestContradictions:
    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    def test_zero_points_of_the_other_format(self, build, tmp_path, bits):
        section = {**V1, "bits": bits}
        write(build(), tmp_path, lambda name: (bits, 32, True), section, 1)
        load_checkpoint(tmp_path)
        set_section(tmp_path, {**section, "checkpoint_format": "gptq_v2"})
        middle = 1 << bits - 1
        with pytest.raises(ValueError, match=f"is stored as {middle - 1}, expected {middle} for"):
            load_checkpoint(tmp_path)

    def test_words_of_another_type(self, usual):
        path = usual[1]
        key = f"{LAYER}.qzeros"
        set_tensors(path, lambda tensors: tensors | {key: tensors[key].to(torch.int16)})
        for load in (load_checkpoint, load_in_float):
            with pytest.raises(ValueError, match=r"int16 .*, expected torch.int32"):
                load(path)

    @pytest.mark.parametrize("desc_act", [True, False])
    def test_groups_of_one_layer_are_missing(self, usual, desc_act):
        values, path = usual
        set_section(path, {**V1, "desc_act": desc_act})
        check_values(path, values)
        key = f"{LAYER}.g_idx"
        set_tensors(path, lambda tensors: {k: v for k, v in tensors.items() if k != key})
        with pytest.raises(ValueError, match=f"{key} is missing"):
            load_checkpoint(path)

    def test_no_layer_has_groups(self, build, tmp_path):
        scheme = {"scheme_of": lambda name: (4, 32, True), "zero_offset": 1, "with_groups": False}
        check_values(tmp_path, write(build(), tmp_path, section=V1, **scheme))
        set_section(tmp_path, {**V1, "desc_act": True})
        with pytest.raises(ValueError, match="g_idx is missing"):
            load_checkpoint(tmp_path)

    def test_groups_of_another_size(self, build, tmp_path):
        """The groups of a layer are compared with its own size, not with that of other layers."""
        dynamic = {r"+:.*v_proj": {"group_size": 64}}

        def scheme_of(name):
            return 4, 64 if name.endswith("v_proj") else 32, True

        write(build(), tmp_path, scheme_of, {**V1, "dynamic": dynamic}, 1)
        key = "model.layers.0.self_attn.v_proj.g_idx"
        set_tensors(tmp_path, lambda tensors: tensors | {key: torch.arange(64).int() // 32})
        with pytest.raises(ValueError, match="not in groups of 64"):
            load_checkpoint(tmp_path)
