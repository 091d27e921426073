"""Kinds of operations for rescaling and rotation: matrix products, attention, factories, views."""

from __future__ import annotations

from quark.torch.graph.trace import Op, Trace, Value

_PRODUCTS = {"mm", "bmm", "_grouped_mm"}
_PRODUCTS_ADDED = {"addmm", "baddbmm"}
ATTENTION_PREFIX = "_scaled_dot_product_"
# The output has the shape of the input, not its values; or it tells which vectors are zero, which
# factors and rotations leave so.
FACTORIES = {
    *("new_empty", "new_zeros", "empty", "zeros", "empty_like", "zeros_like", "zero"),
    *("new_ones", "new_full", "ones_like", "full_like", "fill", "any"),
}
# The output holds the values of the input, unchanged and in the same order.
VIEWS = {"view", "_unsafe_view", "reshape", "clone", "alias", "detach"}


def matmul_operands(op: Op) -> tuple[Value | None, Value, Value] | None:
    """Return the term that a matrix product adds, and its operands.

    Returns:
        (added, left, right) with left (…, rows, inner) and right (…, inner, columns); None for
        operations that are not a matrix product.
    """
    if op.name in _PRODUCTS_ADDED:
        added, left, right = op.args[:3]
        return added, left, right
    if op.name in _PRODUCTS and not any(isinstance(arg, Value) for arg in op.args[3:]):
        return None, op.args[0], op.args[1]
    return None


def find_view_origins(trace: Trace) -> dict[int, int]:
    """Return number of a view or copy -> number of the tensor that it was made from."""
    origin: dict[int, int] = {}
    for op in trace.ops:
        if op.name in VIEWS:
            number = op.inputs[0].number
            for value in op.outputs:
                origin.setdefault(value.number, origin.get(number, number))
    return origin
