"""A plug-in of pytest that adds a number format, as one more line of ``Dtype`` would."""

from quark.torch.numerics.formats import Dtype, Format

NAME = "fp5_e2m2"


def _add(fmt):
    """Add a member to ``Dtype``, which Python itself allows in the body of the class alone."""
    member = object.__new__(Dtype)
    member._name_, member._value_ = fmt.name, fmt
    member._sort_order_ = len(Dtype)
    Dtype._member_names_.append(fmt.name)
    Dtype._member_map_[fmt.name] = Dtype._value2member_map_[fmt] = member


_add(Format(NAME, 5, True, 2, 2, 7.0, word_codes=8, word_dtype="uint8"))
