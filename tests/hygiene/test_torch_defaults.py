"""New tensors name their device, and their type where torch would choose it.

Else they would follow ``torch.set_default_device`` and ``torch.set_default_dtype`` of the
application: ranges would be rounded to bfloat16, and tensors of the CPU would meet those of a GPU.
"""

import ast

import pytest

# Functions of torch -> whether the default type is that of the application, whatever the arguments.
FACTORIES = {
    **dict.fromkeys(("empty", "zeros", "ones", "rand", "randn", "eye", "linspace"), True),
    **dict.fromkeys(("arange", "empty_strided", "full", "randint", "randperm", "tensor"), False),
}


def undecided_calls(tree):
    """(line, function, missing argument) of each call that leaves device or type to torch."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, node.func.value
        if name not in FACTORIES or not isinstance(owner, ast.Name) or owner.id != "torch":
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "device" not in given:
            yield node.lineno, name, "device"
        is_meta = isinstance(given.get("device"), ast.Constant) and given["device"].value == "meta"
        is_float = FACTORIES[name] or _is_float(node.args)
        if is_float and "dtype" not in given and not is_meta:
            yield node.lineno, name, "dtype"


def _is_float(arguments):
    """Whether a number among the arguments is a float, as far as the source shows it."""
    nodes = [node for argument in arguments for node in ast.walk(argument)]
    return any(isinstance(n, ast.Constant) and isinstance(n.value, float) for n in nodes)


def test_new_tensors_name_device_and_type(trees):
    of_library = {name: tree for name, tree in trees.items() if name.startswith("quark.torch")}
    calls = {name: list(undecided_calls(tree)) for name, tree in of_library.items()}
    assert {name: found for name, found in calls.items() if found} == {}


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("torch.zeros(2, dtype=torch.int8)", ["device"]),
        ("torch.zeros(2, device=x.device)", ["dtype"]),
        ("torch.tensor([1.0, 2.0], device='cpu')", ["dtype"]),
        ("torch.empty(2)", ["device", "dtype"]),
        ("torch.empty(2, device='meta')", []),
        ("torch.tensor([1, 2], device='cpu')", []),
        ("torch.zeros_like(x)", []),
    ],
)
def test_calls(source, missing):
    assert [argument for _, _, argument in undecided_calls(ast.parse(source))] == missing
