"""What a run takes, against what runs take: passes, arithmetic, and how memory depends on sizes."""

from collections import Counter as Loads
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.algorithm.registry import ALGORITHMS, load_algorithm
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline import run_steps
from quark.torch.pipeline.requirements import Machine, least_bound, require
from quark.torch.pipeline.run_steps import Run
from quark.torch.pipeline.shapes import BlockShape, DataShape, LayerShape, ModelShape
from quark.torch.quantization.algorithms import find_algorithms
from quark.torch.quantization.calibration import needs_data
from quark.torch.quantization.config.algo import RotationConfig, RoundingConfig
from quark.torch.quantization.config.algo_lookup import algo_config_from_dict, make_algo_configs
from quark.torch.quantization.model_shape import measure_model
from tests.configurations import quantized

MIB = 1 << 20
SHAPES = {"q": (1024, 1024), "up": (4096, 1024), "down": (1024, 4096)}


def block(scale=1):
    layers = [LayerShape(o * scale, i * scale, name) for name, (o, i) in SHAPES.items()]
    elements = sum(layer.elements for layer in layers)
    return BlockShape(4 * elements, elements, tuple(layers))


def request_of(algorithm="gptq", blocks=8, tokens=4096, **changes):
    own, each = (1000 * 1024, block())
    model = ModelShape((own + blocks * each.active) * 4, own * 4, (each,) * blocks, own, own)
    data = DataShape(tokens, 128, 128, 1024, 4, 1000, blocks)
    (options,) = make_algo_configs([algorithm], {})
    work = partial(load_algorithm(algorithm).work, options)
    return Run(model, data, [(algorithm, work)], 0, False, 0, 0)._replace(**changes)


class TestMemory:
    def test_does_not_depend_on_the_number_of_blocks_under_a_bound(self):
        few, many = (require(request_of(blocks=n), 400 * MIB, 2000 * MIB) for n in (40, 120))
        assert few.memory == many.memory
        assert many.read > 2.5 * few.read

    def test_grows_by_the_blocks_in_memory(self):
        few, many = (require(request_of(blocks=n), 400 * MIB) for n in (20, 60))
        assert many.memory - few.memory >= 40 * block().size

    def test_least_bound_is_kept_to_and_less_is_not(self):
        request = request_of(blocks=200)
        least = least_bound(request, 400 * MIB)
        assert require(request, 400 * MIB, least).memory <= least
        less = int(0.98 * least)
        assert require(request, 400 * MIB, less).memory > less
        assert least < require(request, 400 * MIB).memory

    def test_parameters_have_what_the_work_leaves(self):
        request = request_of(blocks=200)
        least = least_bound(request, 400 * MIB)
        tight, wide = (require(request, 400 * MIB, n) for n in (least, 4 * least))
        assert tight.parameters < request.model.largest_unit + 2 * MIB
        assert wide.parameters == (4 * least - 400 * MIB) // 2
        between = require(request, 400 * MIB, least + 400 * MIB)
        assert tight.parameters < between.parameters < (least + 400 * MIB) // 2
        assert least < between.memory <= least + 400 * MIB

    def test_activations_above_the_limit_go_to_the_disk(self):
        small, large = (require(request_of(tokens=n), 0) for n in (1 << 10, 1 << 20))
        assert small.spilled[1] == 0
        # Three stores of 2²⁰ tokens · 1024 channels · 4 bytes, of which 1 GiB stays in memory.
        assert large.spilled[1] == pytest.approx(3 * 2**32 - 2**30, abs=4)

    @pytest.mark.parametrize("algorithm", ["gptq", "awq", "autoround", "smooth"])
    def test_logits_are_not_part_of_it_if_data_runs_through_blocks_alone(self, algorithm):
        def memory(labels, bound, **changes):
            run = request_of(algorithm, **changes)
            needs = require(run._replace(data=run.data._replace(labels=labels)), 0, bound)
            return next(needs.memory_of(s) for s in needs.steps if s.name == algorithm)

        few, many = (memory(labels, 2000 * MIB) for labels in (10, 1000_000))
        assert few == many
        in_memory = [memory(labels, None) for labels in (10, 1000_000)]
        assert (in_memory[0] < in_memory[1]) == (algorithm == "smooth")

    def test_an_evaluation_takes_the_logits_of_a_part_of_a_batch(self):
        def memory(windows, bound):
            run = request_of(evaluated=2**20, evaluated_batch=2048 * windows, evaluated_window=2048)
            run = run._replace(data=run.data._replace(labels=128_000))
            return next(s.memory for s in require(run, 0, bound).steps if s.name == "evaluation")

        one, many = memory(1, None), memory(64, None)
        assert one < 600 * MIB  # a window has a gigabyte of logits
        assert many > 15 * one
        assert memory(64, 4000 * MIB) < 1000 * MIB  # fewer windows at once under a bound

    def test_an_evaluation_in_float32_makes_no_copy_in_float32(self):
        def memory(itemsize):
            run = request_of(evaluated=2048, evaluated_batch=2048, evaluated_window=2048)
            data = run.data._replace(labels=128_000, itemsize=itemsize)
            steps = require(run._replace(data=data), 0).steps
            return next(s.memory for s in steps if s.name == "evaluation")

        logits = 256 * 128_000
        assert 3 * 4 * logits < memory(4) < 3.3 * 4 * logits
        assert memory(2) - memory(4) >= 2 * logits

    def test_from_files_to_files_it_is_that_of_the_largest_layers(self):
        few, many = (
            require(request_of(blocks=n, through_files=True, threads=2), 0) for n in (20, 60)
        )
        assert few.memory == many.memory
        assert many.memory > 2 * 4 * 1024 * 4096
        assert (many.passes, many.read) == (0, request_of(blocks=60).model.size)

    def test_a_forward_pass_ends_before_rounding_begins(self):
        def memory(batch):
            run = request_of("gptq")
            needs = require(run._replace(data=run.data._replace(batch=batch)), 0)
            return next(step.memory for step in needs.steps if step.name == "gptq")

        sums, solving = 2 * block().grams, 4 * (4 * 4096**2 + 10 * 4096 * 1024)
        assert memory(1) == memory(128) == sums + solving
        assert memory(1 << 14) > sums + solving

    @pytest.mark.parametrize("bound", [None, 2000 * MIB])
    def test_a_tokenizer_is_read_once_more_for_a_file_that_holds_it(self, bound):
        needs = require(request_of(tokenizer=900 * MIB), 0, bound)
        assert needs.memory > 900 * MIB + needs.parameters
        small = require(request_of(tokenizer=1), 0, bound)
        assert small.memory == require(request_of(), 0, bound).memory
        assert small.read == require(request_of(), 0, bound).read

    @pytest.mark.parametrize("through_files", [False, True])
    def test_the_tokenizer_is_loaded_before_the_model(self, through_files):
        def memory(size, bound=None):
            run = request_of(tokenizer_loading=size, through_files=through_files)
            return require(run, 100 * MIB, bound).memory

        assert memory(1) == memory(0)
        assert memory(9000 * MIB) == memory(9000 * MIB, 3000 * MIB)
        assert memory(9000 * MIB) == 100 * MIB + int(1.35 * 9000 * MIB)

    def test_a_device_takes_what_the_model_takes(self):
        request = request_of(on_device=True)
        needs = require(request, 400 * MIB)
        assert needs.device_memory > request.model.size + block().grams
        assert needs.memory < 400 * MIB + 3 * request.model.size


def test_processes_send_statistics_and_their_blocks():
    request = request_of(processes=4)
    grams = 8 * 4 * (1024**2 + 1024**2 + 4096**2)  # q and up read inputs of their own
    assert require(request_of(), 0).network == 0
    assert require(request, 0).network == grams + 8 * block().size * 3 // 4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_says_what_it_takes(name):
    (options,) = make_algo_configs([name], {})
    work = load_algorithm(name).work
    data = request_of().data
    small, large = (work(options, block(scale), data) for scale in (1, 2))
    weight = 4 * 1024 * 4096
    assert small.memory >= weight
    assert large.memory > 2 * small.memory
    assert bool(small.passes) == load_algorithm(name).needs_data(options)


@pytest.mark.parametrize("name", ["gptq", "qronos", "yaqa"])
def test_data_held_back_takes_sums_of_its_own(name):
    load, data = load_algorithm(name).work, request_of().data
    plain, chosen = (
        load(algo_config_from_dict({"name": name, "choose_damping": choose}), block(), data)
        for choose in (False, True)
    )
    assert chosen.memory == plain.memory + block().grams or name == "yaqa"
    assert chosen.memory + chosen.solving > plain.memory + plain.solving
    assert chosen.flops > plain.flops


class Counter:
    """Counts the tokens that pass a module."""

    def __init__(self, module):
        self.tokens = 0
        module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        x = args[0] if args else kwargs["hidden_states"]
        self.tokens += x.shape[:-1].numel()


@pytest.mark.parametrize("name", ["awq", "gptq", "qronos", "autoround", "smooth"])
@pytest.mark.sampled(2)
def test_passes_are_those_that_run(name, build, config_of):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = build("llama", **sizes, max_position_embeddings=512)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 64, (1, 512), generator=generator) for _ in range(32)]
    (options,) = make_algo_configs([name], {})
    if name == "autoround":
        options.iters = 10
    config = config_of("int8" if name == "smooth" else "int4_wo_32", algo_config=[options])
    shape = measure_model(model, config)
    data = DataShape(32 * 512, 2048, 512, 64, 4, 64, 2)
    planned = load_algorithm(name).work(options, shape.blocks[0], data).passes
    counter = Counter(model.model.layers[0].mlp)
    ModelQuantizer(config).quantize_model(model, batches)
    passes = counter.tokens / data.tokens
    if name == "smooth":
        passes -= 1  # static ranges of activations
    # A backward pass counts as two, and hooks see the forward passes alone.
    forward = planned - 2 * 10 * 8 / 32 if name == "autoround" else planned
    assert forward == pytest.approx(passes, rel=0.25, abs=0.25)


def test_arithmetic_is_that_of_a_forward_pass(build, config_of):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    model = build("llama", **sizes)
    model.set_attn_implementation("eager")  # whose products are counted
    shape = measure_model(model, config_of("int8_wo"))
    tokens = torch.zeros(2, 48, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    data = DataShape(96, 96, 48, 64, 4, model.config.vocab_size, 3)
    planned = run_steps._model_flops(shape, data)
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.1)


READ = {  # name -> scheme, algorithms
    "rtn": ("uint4_wo_32", []),
    "fp8": ("fp8", []),
    "gptq": ("uint4_wo_32", ["gptq"]),
    "qronos": ("uint4_wo_32", ["qronos"]),
    "yaqa": ("uint4_wo_32", ["yaqa"]),
    "awq": ("uint4_wo_32", ["awq"]),
    "awq and gptq": ("uint4_wo_32", ["awq", "gptq"]),
    "smooth": ("int8", ["smooth"]),
    "quarot": ("uint4_wo_32", ["quarot"]),
    "quarot of values": ("uint4_wo_32", [RotationConfig(r1=False, r2=True, r4=False)]),
    "quarot of inputs": ("uint4_wo_32", [RotationConfig(r1=False, r2=False, r4=True)]),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.sampled(3)
def test_reads_are_those_that_run(name, build, batches, config_of, tmp_path):
    build("llama", torch.bfloat16).save_pretrained(tmp_path / "float")
    model = stream_model(tmp_path / "float", 1 << 40)
    residency, loaded = residency_of(model), Loads()
    residency.limit, read = 0, residency._read
    residency._read = lambda unit: (loaded.update([unit.name]), read(unit))
    scheme, algorithms = READ[name]
    if algorithms and isinstance(algorithms[0], str):
        algorithms = make_algo_configs(algorithms, {})
    config = config_of(scheme, algo_config=algorithms)
    export_safetensors(quantized(model, config, batches), tmp_path / "out")
    planned = sum(step.reads for step in run_steps.list_steps(_run_of(config), 0, True))
    # The first block is read once more, to know the stored tensors of a layer.
    assert loaded["model.layers.1"] == planned == loaded["model.layers.0"] - 1


def _run_of(config):
    chosen = find_algorithms(config)
    return request_of(
        is_static=needs_data([config.global_quant_config]),
        proves=len({kind for algorithm, options in chosen for kind in algorithm.proves(options)}),
        rounds=any(isinstance(options, RoundingConfig) for _, options in chosen),
        algorithms=[(o.name, partial(algorithm.work, o)) for algorithm, o in chosen],
    )


class TestGraph:
    """An ONNX file is traced, which is work of the interpreter, and written in one piece."""

    def test_tracing_counts_in_time_and_memory(self):
        plain = request_of(blocks=4)
        traced = plain._replace(traces=True, output=500 * MIB)
        step = require(traced, 400 * MIB).steps[-1]
        assert step.name == "tracing the graph" and step.seconds > 12 * run_steps.LAYER_SECONDS
        assert require(traced, 400 * MIB).memory > require(plain, 400 * MIB).memory + 1000 * MIB
        machine = Machine(flops=1e12, solver_flops=1e12, read=1e12, write=1e12)
        more = require(traced, 0).seconds(machine) - require(plain, 0).seconds(machine)
        assert more == pytest.approx(step.seconds, abs=0.1)
        cached = require(traced._replace(traces_cache=True), 0).steps[-1]
        assert cached.seconds > step.seconds
