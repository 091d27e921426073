"""Both kinds of quantized layer are used through their base, ``QuantizedLayer``."""

import ast

NN = "quark.torch.quantization.nn"
BOTH = {"FakeQuantizedLayer", "PackedLayer"}


def names(tree):
    """Every name that a module uses, also in annotations."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def outside(trees):
    return {name: tree for name, tree in trees.items() if not name.startswith(f"{NN}.")}


def test_no_module_names_both_kinds(trees):
    both = [name for name, tree in outside(trees).items() if names(tree) >= BOTH]
    assert both == [], "use QuantizedLayer and its members"


def test_the_axis_of_inputs_is_asked_of_the_layer(trees):
    """Which operators have a weight of (inputs, outputs) is known to ``nn.layer`` alone."""
    compared = [
        name
        for name, tree in outside(trees).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], (ast.Eq, ast.Is))
        and any(isinstance(x, ast.Constant) and x.value == "Conv1D" for x in node.comparators)
    ]
    assert compared == [], "use layer.input_axis, or nn.layer.input_axis(kind)"


def test_the_pair_is_found():
    pair = ast.parse("def f(x: FakeQuantizedLayer | PackedLayer): pass")
    assert names(pair) >= BOTH
    assert not names(ast.parse("def f(x: FakeQuantizedLayer): pass")) >= BOTH
