"""Shapes of a model and its data, and what an algorithm takes for them.

They are known from the headers of files, so memory and arithmetic are known before any work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

FLOAT32, FLOAT64 = 4, 8  # bytes
PASS_READS = 3  # of a block in a pass over the model: to find blocks, then stacks, and to run it


class LayerShape(NamedTuple):
    """A layer whose weight will be quantized.

    Attributes:
        outputs: Rows of the weight as a matrix.
        inputs: Columns.
        shared_input: Layers with the same value read the same tensor.
        share: Part of the tokens that reaches it: 1, or less for an expert.
        itemsize: Bytes of an element as the model is loaded.
    """

    outputs: int
    inputs: int
    shared_input: str
    share: float = 1.0
    itemsize: int = FLOAT32

    @property
    def elements(self) -> int:
        """Number of weights."""
        return self.outputs * self.inputs


class BlockShape(NamedTuple):
    """A block: a member of a module list, such as a decoder block.

    Attributes:
        size: Bytes of its parameters.
        active: Weights that a token is multiplied by, on average.
        layers: Its quantized layers.
    """

    size: int
    active: float
    layers: tuple[LayerShape, ...]

    @property
    def elements(self) -> int:
        """Number of quantized weights."""
        return sum(layer.elements for layer in self.layers)

    @property
    def changed(self) -> int:
        """Bytes of the quantized weights as the model is loaded."""
        return sum(layer.elements * layer.itemsize for layer in self.layers)

    @property
    def input_widths(self) -> list[int]:
        """Widths of the tensors that quantized layers read, each tensor once."""
        return list({layer.shared_input: layer.inputs for layer in self.layers}.values())

    @property
    def grams(self) -> int:
        """Bytes of the sums of x xᵀ over each of these tensors.

        While data runs, there are two: those of a part of the data, and the total.
        """
        return sum(width * width * FLOAT32 for width in self.input_widths)

    @property
    def pooling(self) -> int:
        """Bytes that mixing these sums among experts takes: those of all experts."""
        return self.largest(lambda x: FLOAT32 * x.inputs**2 if x.share < 1 else 0)

    def largest(self, size: Callable[[LayerShape], int]) -> int:
        """Return the largest value of a function of a layer; 0 without layers."""
        return max(map(size, self.layers), default=0)


class DataShape(NamedTuple):
    """Calibration data, and the tensors that it becomes.

    Attributes:
        tokens: Number of tokens.
        batch: Tokens of a chunk, which run at once.
        length: Tokens of a sequence.
        hidden: Width of hidden states.
        itemsize: Bytes of an element of hidden states.
        labels: Width of logits.
        blocks: Number of blocks.
    """

    tokens: int
    batch: int
    length: int
    hidden: int
    itemsize: int
    labels: int
    blocks: int

    @property
    def hidden_states(self) -> int:
        """Bytes of the hidden states between two blocks."""
        return self.tokens * self.hidden * self.itemsize

    @property
    def logits(self) -> int:
        """Bytes of the logits of a batch."""
        return self.batch * self.labels * self.itemsize


class Work(NamedTuple):
    """What an algorithm takes for a block.

    Attributes:
        memory: Bytes beside parameters, hidden states and what a forward pass takes.
        passes: Forward passes of all data through the block; a backward pass counts as two.
        flops: Arithmetic beside these passes.
        stores: Copies of the hidden states that are held meanwhile.
        changes: Whether values of weights change.
        reads: Times that the block is brought into memory, if it is not there: for most, once to
            find the stacks of blocks that run one after the other, and once to run it.
        held: Bytes of statistics that stay in stores until the end of the algorithm, up to the
            limit of activations.
        is_local: Whether it needs one block at a time. Otherwise the model must be in memory.
        runs_model: Whether a model in memory runs whole, output head included. One that is read in
            parts runs up to the last block.
        solving: Bytes beside ``memory`` that rounding takes, when no forward pass runs.
    """

    memory: int = 0
    passes: float = 0.0
    flops: float = 0.0
    stores: int = 0
    changes: bool = True
    reads: int = 2
    held: int = 0
    is_local: bool = True
    runs_model: bool = False
    solving: int = 0


class ModelShape(NamedTuple):
    """A model, as it is loaded.

    Attributes:
        size: Bytes of its parameters and buffers.
        largest_unit: Bytes of the largest part that is brought into memory at once.
        blocks: Its blocks.
        around: Weights outside of the blocks: embedding, output head.
        around_largest: Weights of the largest layer outside of the blocks.
        quantized_around: Quantized layers outside of the blocks.
        converted: Bytes of parameters that are made of several tensors of the files, such as
            stacked experts: these tensors stay mapped to memory.
        stored: Bytes of its tensors in the files, fewer than ``size`` where they are quantized;
            0 for as many.
    """

    size: int
    largest_unit: int
    blocks: tuple[BlockShape, ...]
    around: int
    around_largest: int
    quantized_around: tuple[LayerShape, ...] = ()
    converted: int = 0
    stored: int = 0

    @property
    def read_size(self) -> int:
        """Bytes that are read for all parameters."""
        return self.stored or self.size

    @property
    def layers(self) -> list[LayerShape]:
        """All quantized layers."""
        return [*self.quantized_around, *(x for block in self.blocks for x in block.layers)]

    @property
    def changed(self) -> int:
        """Bytes of all quantized weights, as the model is loaded."""
        return sum(x.elements * x.itemsize for x in self.layers)

    @property
    def largest_weight(self) -> int:
        """Elements of the largest quantized weight."""
        return max((x.elements for x in self.layers), default=0)


def windows_at_once(most: int, length: int, widest: int, limit: int) -> int:
    """Return how many windows of tokens run together through a model that is read in parts.

    Args:
        most: The largest number.
        length: Tokens of a window.
        widest: Outputs of the widest layer in a block.
        limit: Bytes of activations that may be in memory.
    """
    return max(1, min(most, limit // (FLOAT32 * length * (10 * widest + length))))


def gram_flops(block: BlockShape, data: DataShape) -> float:
    """Return the arithmetic of the sums of x xᵀ over all tokens."""
    shares = {layer.shared_input: layer.share for layer in block.layers}
    widths = {layer.shared_input: layer.inputs for layer in block.layers}
    return sum(2.0 * data.tokens * shares[name] * width**2 for name, width in widths.items())


def damping_work(block: BlockShape) -> tuple[int, float]:
    """Return memory and arithmetic of the choice of damping on data held back.

    Memory holds six matrices of the largest inputs: both folds, reordered, a factor, and a product.
    Each damping of five takes two factors and two products.
    """
    widths = {layer.shared_input: layer.inputs for layer in block.layers if layer.share == 1}
    memory = max((6 * FLOAT32 * width**2 for width in widths.values()), default=0)
    return memory, sum(5 * 4.0 * width**3 for width in widths.values())


def solver_memory(block: BlockShape) -> int:
    """Return the bytes that rounding takes which compensates for errors, for the largest layer.

    Four matrices of its inputs (reordered Hessian, factors; the Hessian takes the memory of the
    sums) and ten of its weight (values, clipped, refitted; remaining, rounded and errors of
    columns).
    """
    return block.largest(lambda x: FLOAT32 * (4 * x.inputs**2 + 10 * x.elements))


def solver_flops(block: BlockShape) -> float:
    """Return the arithmetic of rounding with compensation: two factors, updates, clipping."""
    return sum(
        2.0 * x.inputs**3 + x.outputs * x.inputs**2 + 2000.0 * x.elements for x in block.layers
    )
