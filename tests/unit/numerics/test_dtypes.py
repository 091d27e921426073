"""Names of types stand for those of torch."""

import pytest
import torch

from quark.torch.export.checkpoint.headers import TYPES
from quark.torch.numerics.dtypes import ITEM_SIZES, torch_dtype, type_name
from quark.torch.numerics.formats import Dtype


@pytest.mark.parametrize("name", ITEM_SIZES)
def test_sizes_are_those_of_torch(name):
    assert torch_dtype(name).itemsize == ITEM_SIZES[name]
    assert type_name(torch_dtype(name)) == type_name(name) == name


def test_every_name_that_is_used_has_a_size():
    names = set(TYPES.values())
    for member in Dtype:
        names |= {member.value.code_type, member.value.storage_type}
    assert names == set(ITEM_SIZES)


@pytest.mark.parametrize("name", ["float7", "nn", ""])
def test_an_unknown_name(name):
    with pytest.raises(ValueError, match="is not a type of torch"):
        torch_dtype(name)


def test_a_type_is_not_a_name():
    with pytest.raises(TypeError):
        torch_dtype(torch.float32)
