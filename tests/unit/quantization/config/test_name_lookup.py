"""Look-up by name."""

import pytest

from quark.torch.quantization.config.name_lookup import nearest, one_of, unknown

CHOICES = ["per_tensor", "per_channel", "per_group"]


@pytest.mark.parametrize("given", ["per_group", "PER_GROUP", "Per_Group"])
def test_one_of_ignores_case(given):
    assert one_of(given, CHOICES, "qscheme") == "per_group"


def test_one_of_prefers_the_exact_case():
    assert one_of("MSE", ["mse", "MSE"], "observer_method") == "MSE"


def test_one_of_names_the_nearest_and_all():
    with pytest.raises(ValueError) as raised:
        one_of("per_grup", CHOICES, "qscheme")
    assert str(raised.value) == (
        "qscheme: 'per_grup' is unknown. Did you mean 'per_group'? "
        "Known: per_tensor, per_channel, per_group."
    )


def test_unknown_without_anything_near():
    assert unknown("xyz", CHOICES, "qscheme") == (
        "qscheme: 'xyz' is unknown. Known: per_tensor, per_channel, per_group."
    )
    assert unknown("xyz", [], "scheme") == "scheme: 'xyz' is unknown. Known: none."


def test_choices_may_be_an_iterator():
    with pytest.raises(ValueError, match="Known: per_tensor, per_channel, per_group"):
        one_of("xyz", iter(CHOICES), "qscheme")


def test_nearest_is_best_first_and_limited():
    assert nearest("lm_heads", ["head", "lm_head", "q_proj"]) == ["lm_head", "head"]
    assert nearest("lm_heads", ["head", "lm_head", "q_proj"], count=1) == ["lm_head"]
    assert nearest("LM_HEAD", ["lm_Head"]) == ["lm_Head"]
