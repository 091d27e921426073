"""The bound of the parameters of a model that is read in parts, set by what the work takes."""

from __future__ import annotations

from functools import partial

from torch import nn

from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.chunks import count_tokens
from quark.torch.pipeline.requirements import require
from quark.torch.pipeline.run_steps import Run
from quark.torch.pipeline.shapes import DataShape, ModelShape
from quark.torch.quantization.algorithms import count_with_random
from quark.torch.quantization.calibration import needs_data
from quark.torch.quantization.config.attention import softmax_layers
from quark.torch.quantization.model_shape import describe_data, measure_model
from quark.torch.quantization.plan import Plan


def limit_parameters(model: nn.Module, plan: Plan) -> None:
    """Bound the resident parameters of a model, so that the largest step of a plan has room.

    Does nothing for a model in memory, without data, and on a device, whose memory is its own.

    Args:
        model: The float model; released parameters stay so.
        plan: How it will be quantized.
    """
    residency = residency_of(model)
    if residency is None or residency.room is None or not plan.has_data:
        return
    shape = measure_model(model, plan.config)
    run = Run(
        model=shape,
        data=_describe(model, plan, shape),
        algorithms=[(o.name, partial(algorithm.work, o)) for algorithm, o in plan.algorithms],
        proves=len({kind for a, options in plan.algorithms for kind in a.proves(options)}),
        is_static=needs_data([*plan.layers.values(), *softmax_layers(plan.config)]),
        output=0,
        packed=0,
    )
    residency.limit = min(residency.limit, require(run, 0, residency.room).parameters)


def _describe(model: nn.Module, plan: Plan, shape: ModelShape) -> DataShape:
    sizes = [count_tokens(chunk) for chunk in plan.batches]
    largest, length = max(sizes, default=(0, 0))
    tokens = count_with_random(sum(tokens for tokens, _ in sizes), plan.algorithms)
    return describe_data(model, tokens, largest, length, len(shape.blocks))
