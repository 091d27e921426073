"""Hidden states among the arguments and in the outputs of blocks."""

from typing import NamedTuple

import pytest
import torch

from quark.torch.pipeline.hidden_states import OutputForm, OutputForms, split_hidden_states


def test_hidden_states_by_position_or_by_name():
    x, mask = torch.zeros(1), torch.ones(1)
    assert split_hidden_states((x, mask), {"flag": True}) == (x, ((mask,), {"flag": True}))
    assert split_hidden_states((), {"hidden_states": x, "mask": mask}) == (x, ((), {"mask": mask}))


class Named(NamedTuple):
    """The output of a block: hidden states and the weights of its attention."""

    states: torch.Tensor
    weights: torch.Tensor | None = None


X, OTHER = torch.ones(2, 3), torch.ones(4)


@pytest.mark.parametrize(
    ("output", "place", "is_plain"),
    [
        (X, 0, True),
        ((X,), 0, True),
        ((X, None), 0, True),
        (Named(X), 0, True),
        ((None, X), 1, True),
        ((OTHER, X), 1, False),
        ((X, OTHER), 0, False),
        ((X, [OTHER]), 0, False),
        ([X], 0, False),
    ],
)
def test_forms(output, place, is_plain):
    form = OutputForm.of(output, X.shape)
    assert (form.place, form.is_plain) == (place, is_plain)
    if not isinstance(output, list):
        y = torch.zeros(2, 3)
        wrapped = form.wrap(y)
        assert type(wrapped) is type(output)
        assert (wrapped if isinstance(output, torch.Tensor) else wrapped[place]) is y
        assert isinstance(output, torch.Tensor) or len(wrapped) == len(output)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_hidden_states_are_what_the_next_block_receives(place):
    """Not the first tensor of the shape: all three have it."""
    output, forms = tuple(torch.ones(2, 3) for _ in range(3)), OutputForms()
    forms.leave("one", output, X.shape)
    assert forms.by_name["one"].place == 0  # as long as nothing receives it
    forms.receive(output[place])
    forms.leave("two", output[place], X.shape)
    assert forms.by_name["one"].place == place
    y = torch.zeros(2, 3)
    wrapped = forms.by_name["one"].wrap(y)
    assert wrapped[place] is y
    assert all(wrapped[i] is output[i] for i in range(3) if i != place)


def test_a_tensor_that_is_made_between_blocks_leaves_the_form():
    forms = OutputForms()
    forms.leave("one", (OTHER, X), X.shape)
    forms.receive(X + 1)
    assert forms.by_name["one"].place == 1
