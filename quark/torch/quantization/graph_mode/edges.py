"""Quantizers on the edges of a graph: inputs and outputs of layers and operators.

A configuration with inputs and outputs quantizes ``relu(conv(x)).flatten()`` before a linear layer
as follows, where Q is one quantizer:

    x -> Q1 -> conv -> relu -> Q2 -> flatten -> Q2 -> linear -> Q3

- Readers of one value share its quantizer if their specifications are the same.
- A product that nothing reads but a clamp (ReLU, ReLU6, …) is quantized after the clamp only.
- Operators that only move values share the scale of what they move. So do all inputs and the
  output of a concatenation.
- A clamp that is not after a product, such as min(x, cap), sets the range of what it alone reads.
  So does a max pool.
- A value without the axes that its specification names stays in float.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.graph_mode.nodes import operator_name
from quark.torch.quantization.graph_mode.operators import CLAMPS, float_inputs, results
from quark.torch.quantization.nn.learned_range import make_quantizer
from quark.torch.quantization.nn.quantizer import TensorQuantizer

logger = logging.getLogger(__name__)

# Operators whose results have a part of the range of their inputs, and that commute with rounding.
_LIMITING = {*CLAMPS, "minimum", "maximum", "max_pool1d", "max_pool2d", "max_pool3d"}
EDGES = "edge_quantizers"  # module of a graph that holds the quantizers of its edges


class MovedQuantizer(nn.Module):
    """Quantizes values that another quantizer has quantized before they were moved.

    It has no scale of its own, and observes nothing.

    Args:
        source: The quantizer of the values before they were moved, which is a module of the graph.
    """

    def __init__(self, source: TensorQuantizer) -> None:
        super().__init__()
        self._source = (source,)  # a tuple: the graph owns the quantizer

    @property
    def source(self) -> TensorQuantizer:
        """The quantizer of the values before they were moved."""
        return self._source[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantize ``x``."""
        source = self.source
        if source.is_observing or not source.enabled:
            return x
        return source.fake_quantized(x)  # the range does not follow values a second time


class CappedQuantizer(MovedQuantizer):
    """Quantizes values that nothing but a clamp or a max pool reads, by the quantizer after it.

    Rounding is monotonic, so Q(min(Q(x), Q(cap))) = Q(min(x, cap)), and Q(max(Q(x), Q(y))) =
    Q(max(x, y)): this quantizer changes no result. It lets integer products end before the clamp,
    and keeps values out of the range that no maximum takes. In training mode it does nothing, so
    that the range follows values that are not cut yet.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantize ``x`` in evaluation mode."""
        return x if self.training else super().forward(x)


class _Key(NamedTuple):
    """A quantized value.

    Attributes:
        value: Node of the value.
        spec: Number of its specification.
    """

    value: fx.Node
    spec: int


@dataclass
class Edges:
    """The quantizers that a graph gets.

    Attributes:
        specs: All specifications.
        readers: Quantized value -> the nodes that read it quantized; None for all nodes.
        origins: Quantized value that an operator moved -> what it was before.
        capped: Quantized values that nothing but a clamp or a max pool reads, which sets their
            range.
    """

    specs: list[QuantizationSpec] = field(default_factory=list)
    readers: dict[_Key, set[fx.Node] | None] = field(default_factory=dict)
    origins: dict[_Key, set[_Key]] = field(default_factory=dict)
    capped: set[_Key] = field(default_factory=set)

    @property
    def uses_data(self) -> bool:
        """Whether a scale is calibrated where there is data."""
        return any(self.specs[key.spec].needs_data for key in self.readers)

    @property
    def needs_data(self) -> bool:
        """Whether a scale has to be calibrated. Trained ranges can start while they train."""
        specs = (self.specs[key.spec] for key in self.readers)
        return any(spec.needs_data and spec.range_training is None for spec in specs)

    def is_observed(self, key: _Key) -> bool:
        """Whether a quantized value takes part in the range of its group."""
        return key not in self.capped and self.origins.get(key, set()) <= self.capped

    def key(self, value: fx.Node, spec: QuantizationSpec) -> _Key:
        """Return the key of a value under a specification."""
        if spec not in self.specs:
            self.specs.append(spec)
        return _Key(value, self.specs.index(spec))

    def groups(self) -> list[list[_Key]]:
        """Return the quantized values in groups that share a scale, in the order of the graph."""
        group_of = {key: [key] for key in self.readers}
        for key, origins in self.origins.items():
            for origin in origins:
                first, second = group_of[key], group_of[origin]
                if first is not second:
                    first += second
                    group_of |= dict.fromkeys(second, first)
        order = {key: number for number, key in enumerate(self.readers)}
        groups = {id(group): sorted(group, key=order.__getitem__) for group in group_of.values()}
        return sorted(groups.values(), key=lambda group: order[group[0]])


def plan_edges(
    configs: Mapping[fx.Node, QuantizationConfig],
    movements: set[fx.Node],
    fused: Collection[str] = CLAMPS,
    in_float: Collection[fx.Node] = (),
) -> Edges:
    """Return the quantizers that a graph gets.

    Args:
        configs: Configuration of layers and operators, in the order of the graph.
        movements: Nodes whose operators only move values.
        fused: Names of activations that are computed together with the product before them.
        in_float: Nodes whose results stay in float; what they move stays so too.
    """
    edges = Edges()
    activation_of = dict(_fused_activations(configs, movements, fused))
    for node, config in configs.items():
        is_moved_in_float = node in in_float and node in movements
        if config.input_tensors is not None and not is_moved_in_float:
            for value in float_inputs(node):
                if activation_of.get(value) is not node and _fits(value, config.input_tensors):
                    readers = edges.readers.setdefault(
                        edges.key(value, config.input_tensors), set()
                    )
                    if readers is not None:
                        readers.add(node)
        is_quantized = node not in activation_of and node not in in_float
        if config.output_tensors is not None and is_quantized:
            for value in results(node):
                if not value.users or not _fits(value, config.output_tensors):
                    continue
                edges.readers[edges.key(value, config.output_tensors)] = None
    for key in edges.readers:
        if _is_shareable(edges.specs[key.spec]):
            origins = _origins(key, edges.readers, movements)
            if origins:
                edges.origins[key] = origins
            if all(_limits_range(origin.value, key.value) for origin in origins):
                edges.capped |= origins
    return edges


def returned_values(graph: fx.GraphModule, movements: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose results a graph returns, also after operators that move them."""
    values: set[fx.Node] = set()
    pending = list(graph.graph.output_node().all_input_nodes)
    while pending:
        node = pending.pop()
        values.add(node)
        if node in movements or node.target is operator.getitem:
            pending += node.all_input_nodes
    return values


def insert_edges(graph: fx.GraphModule, edges: Edges, trains: bool = True) -> None:
    """Insert quantizers into a graph, in place.

    Args:
        graph: The graph.
        edges: The quantizers.
        trains: Whether ranges train whose specifications say so.
    """
    names: dict[_Key, str] = {}
    device = next((p.device for p in graph.parameters()), torch.device("cpu"))
    for group in edges.groups():
        source: TensorQuantizer | None = None
        name = ""
        for key in sorted(group, key=edges.is_observed, reverse=True):  # observed values come first
            if source is None:
                spec = edges.specs[key.spec]
                shape = _trained_shape(key.value, spec)
                source = make_quantizer(spec, shape, device) if trains else TensorQuantizer(spec)
                name = _add(graph, key.value, source)
            if edges.is_observed(key):
                names[key] = name
            else:
                kind = CappedQuantizer if key in edges.capped else MovedQuantizer
                names[key] = _add(graph, key.value, kind(source))
    # A value that all nodes read quantized: its producer comes first, so it is inserted first.
    quantized: dict[fx.Node, fx.Node] = {}
    for key, readers in edges.readers.items():
        node = _insert(graph, quantized.get(key.value, key.value), names[key], readers)
        if readers is None:
            quantized[key.value] = node
    graph.graph.lint()
    graph.recompile()


def edge_quantizers(graph: nn.Module) -> dict[str, TensorQuantizer]:
    """Return the quantizers of the edges of a graph by name, those of moved values aside."""
    holder = getattr(graph, EDGES, None)
    children = holder.named_children() if isinstance(holder, nn.Module) else ()
    return {name: q for name, q in children if isinstance(q, TensorQuantizer)}


def reset_edges(graph: fx.GraphModule) -> None:
    """Give the edges of a graph quantizers without scales, in place; their ranges do not train."""
    new = {q: TensorQuantizer(q.spec) for q in edge_quantizers(graph).values()}
    holder = getattr(graph, EDGES, nn.Module())
    for name, module in list(holder.named_children()):
        if isinstance(module, MovedQuantizer):
            module._source = (new[module.source],)
        elif isinstance(module, TensorQuantizer):
            setattr(holder, name, new[module])
    graph.eval()


def edge_quantizer(graph: fx.GraphModule, node: Any) -> TensorQuantizer | None:
    """Return the quantizer that a node applies to a value of a graph; None for anything else."""
    is_call = isinstance(node, fx.Node) and node.op == "call_module"
    module = graph.get_submodule(str(node.target)) if is_call else None
    quantizer = module.source if isinstance(module, MovedQuantizer) else module
    return quantizer if isinstance(quantizer, TensorQuantizer) else None


def edge_modules(graph: nn.Module) -> dict[str, TensorQuantizer]:
    """Return every module on an edge of a graph by name, with the quantizer that it applies.

    Example: ``edge_quantizers.relu`` and ``edge_quantizers.max_pool2d``, which quantizes the values
    that the max pool moved, have one quantizer.
    """
    modules: dict[str, TensorQuantizer] = {}
    for name, module in graph.named_modules():
        quantizer = module.source if isinstance(module, MovedQuantizer) else module
        if name.startswith(f"{EDGES}.") and isinstance(quantizer, TensorQuantizer):
            modules[name] = quantizer
    return modules


def _fused_activations(
    configs: Mapping[fx.Node, QuantizationConfig], movements: set[fx.Node], fused: Collection[str]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Iterate over (product, activation) where the activation is the only reader of the product."""
    for node, config in configs.items():
        reader = next(iter(node.users), None)
        if reader is None or len(node.users) > 1 or node in movements or reader not in configs:
            continue
        is_same = configs[reader].output_tensors == config.output_tensors
        if is_same and operator_name(reader) in fused:
            yield node, reader


def _limits_range(value: fx.Node, reader: fx.Node) -> bool:
    """Whether a clamp or a max pool is the only reader of a value."""
    return operator_name(reader) in _LIMITING and set(value.users) == {reader}


def _fits(value: fx.Node, spec: QuantizationSpec) -> bool:
    """Whether a value has the axes of its specification, such as that of the blocks of MX."""
    # Example: blocks along axis 1 of pictures; the slopes of a PReLU have axis 0 alone.
    try:
        spec.scheme.blocks((1,) * value.meta["val"].dim())
    except ValueError as error:
        logger.info("%s stays in float: %s", value.name, error)
        return False
    return True


def _is_shareable(spec: QuantizationSpec) -> bool:
    """Whether quantized values stay quantized when they are moved: one static scale for all."""
    scheme = spec.scheme
    is_per_tensor = scheme.qscheme is QSchemeType.per_tensor and not spec.is_dynamic
    return is_per_tensor and scheme.fmt.scaled


def _origins(
    key: _Key, readers: Mapping[_Key, set[fx.Node] | None], movements: set[fx.Node]
) -> set[_Key]:
    """Return the quantized values that an operator moved to make a value; empty if it did not.

    Values that are not quantized themselves are followed back through more movements.
    """
    node = key.value
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    if node not in movements:
        return set()
    origins: set[_Key] = set()
    for value in float_inputs(node):
        before = _Key(value, key.spec)
        more = {before} if before in readers else _origins(before, readers, movements)
        if not more:
            return set()
        origins |= more
    return origins


def _trained_shape(value: fx.Node, spec: QuantizationSpec) -> tuple[int, ...]:
    """Return the shape of the scale of a value if it is trained, else ().

    Raises:
        ValueError: The axis of the channels has any size.
    """
    scheme = spec.scheme
    if spec.range_training is None or scheme.qscheme is not QSchemeType.per_channel:
        return ()
    channels = value.meta["val"].shape[scheme.axis]
    if not isinstance(channels, int):
        raise ValueError(
            f"{value.name} has any size along ch_axis={scheme.axis}, so a range for each channel "
            "cannot train: export the graph with a fixed size of this axis."
        )
    return (channels,)


def _add(graph: fx.GraphModule, value: fx.Node, quantizer: nn.Module) -> str:
    """Add the quantizer of a value to a graph and return its name."""
    holder = getattr(graph, EDGES, nn.Module)
    name, number = value.name, 0
    while hasattr(holder, name):  # another quantizer, or an attribute of modules such as "to"
        number += 1
        name = f"{value.name}_{number}"
    graph.add_submodule(f"{EDGES}.{name}", quantizer)
    return f"{EDGES}.{name}"


def _insert(
    graph: fx.GraphModule, value: fx.Node, name: str, readers: set[fx.Node] | None
) -> fx.Node:
    """Let nodes read a value through a quantizer, None for all nodes; return the node of it."""
    chosen = set(value.users) if readers is None else readers & set(value.users)
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    with graph.graph.inserting_before(min(chosen, key=order.__getitem__)):
        node = graph.graph.call_module(name, (value,))
    kept = ("val", "nn_module_stack", "stack_trace")
    node.meta = {key: value.meta[key] for key in kept if key in value.meta}
    for reader in chosen:
        reader.replace_input_with(value, node)
    return node
