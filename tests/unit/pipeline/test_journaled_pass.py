"""A run that was interrupted goes on after its finished blocks: the model has the same bits."""

import os
import shutil
from contextlib import nullcontext
from copy import deepcopy
from threading import BrokenBarrierError

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

from quark.torch import Journal, ModelQuantizer
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.graph.parameter_writes import write_
from quark.torch.graph.residency import resident
from quark.torch.pipeline import journal as journal_module
from quark.torch.pipeline.journal import PassFiles
from quark.torch.pipeline.processes import processes
from quark.torch.pipeline.runner import run_blocks
from quark.torch.quantization.config import algo
from quark.torch.quantization.config.presets import scheme
from tests.unit.pipeline import threads as threads_module

ROTATION = algo.RotationConfig(r1=True, r2=True, r3=False, r4=False)
# Name -> scheme and algorithms. Blocks run before they are changed in the first two.
ALGORITHMS = {
    "awq": ("uint4_wo_32", [algo.AWQConfig()]),
    "auto": ("int8", [algo.AutoSmoothQuantConfig()]),
    "gptq": ("int4_wo_32", [algo.GPTQConfig(true_sequential=True)]),
    "qronos": ("mxfp4", [algo.QronosConfig()]),  # inputs are quantized while data runs
    "yaqa": ("int4_wo_32", [algo.YaqaConfig()]),
    "damping": ("int4_wo_32", [algo.GPTAQConfig(choose_damping=True, random_tokens=0.25)]),
    "autoround": ("uint4_wo_32", [algo.AutoRoundConfig(iters=2)]),
    "joint": ("uint4_wo_32", [algo.BlockwiseJointTuningConfig(epochs=1)]),
    "rotation": ("int4_wo_32", [ROTATION, algo.GPTQConfig()]),
    "smooth": ("int8", [algo.SmoothQuantConfig(), algo.GPTQConfig()]),
    "svdquant": ("mxfp4", [algo.SVDQuantConfig(svd_rank=4, min_layer_size=0)]),
    "pruning": ("int4_wo_32", [algo.SparseGPTConfig(), algo.GPTQConfig()]),
    "two": ("uint4_wo_32", [algo.AWQConfig(), algo.QronosConfig()]),
}
BART = {
    **{"vocab_size": 64, "d_model": 64, "max_position_embeddings": 64, "init_std": 0.2},
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 96 for side in ("encoder", "decoder")},
}
NIGHTLY = pytest.mark.nightly
CASES = [
    *(("llama", name) for name in ("awq", "gptq", "autoround", "joint", "svdquant")),
    *(pytest.param("llama", n, marks=NIGHTLY) for n in ("auto", "qronos", "yaqa", "smooth", "two")),
    pytest.param("llama", "rotation", marks=NIGHTLY),
    ("llama", "pruning"),
    ("llama", "damping"),
    ("mixtral", "qronos"),
    pytest.param("mixtral", "awq", marks=NIGHTLY),
    ("bart", "gptq"),
    pytest.param("bart", "yaqa", marks=NIGHTLY),
]


class Killed(Exception):
    """Takes the place of a signal."""


@pytest.fixture
def kill_after(monkeypatch):
    """Break off a run as soon as a number of blocks is finished."""
    write = PassFiles.write

    def kill_after(count):
        written = []

        def stop(self, *arguments):
            written.append(write(self, *arguments))
            if len(written) == count:
                raise Killed
            return written[-1]

        monkeypatch.setattr(PassFiles, "write", stop)
        return written

    return kill_after


@pytest.fixture
def make(build):
    def make(kind):
        if kind != "bart":
            return build(kind, **({"num_local_experts": 3} if kind == "mixtral" else {}))
        torch.manual_seed(0)
        return BartForConditionalGeneration(BartConfig(**BART)).eval()

    return make


def state_of(model):
    """Values of all tensors, flags of the layers, and tokens of the experts."""
    with resident(model, ""):
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {n: m.frozen for n, m in model.named_modules() if hasattr(m, "frozen")}
    return tensors, flags, [m.tokens for m in model.modules() if hasattr(m, "token_counts")]


def assert_same(found, expected):
    assert found[0].keys() == expected[0].keys() and found[1:] == expected[1:]
    for name, tensor in expected[0].items():
        assert torch.equal(found[0][name], tensor), name


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.sampled(6)
def test_the_bits_are_those_of_one_run(make, batches, config_of, tmp_path, kill_after, kind, name):
    kind_of_weights, algorithms = ALGORITHMS[name]
    make(kind).save_pretrained(tmp_path / "model")

    def run(journal=None, count=None):
        written = kill_after(count)
        model = stream_model(tmp_path / "model")
        config = config_of(kind_of_weights, algo_config=algorithms)
        try:
            ModelQuantizer(config, journal=journal).quantize_model(model, batches)
        except Killed:
            return None, written
        return state_of(model), written

    expected, written = run()
    assert written == []
    with Journal(tmp_path / "journal") as journal:
        count = 3 if kind == "bart" or name in ("two", "pruning") else 1
        assert run(journal, count)[0] is None
        assert journal.finished == count
    with Journal(tmp_path / "journal") as journal:
        state, written = run(journal)
        assert_same(state, expected)
        assert len(written) == journal.finished - count == 4 // (1 + (count == 1)) - count
        state, written = run(journal)  # killed after the last block
        assert_same(state, expected)
        assert written == []


def test_a_model_in_memory_goes_on_too(make, batches, config_of, tmp_path, kill_after):
    config = config_of("int4_wo_32", algo_config=[algo.GPTQConfig()])
    expected = state_of(ModelQuantizer(config).quantize_model(make("llama"), batches))
    with Journal(tmp_path / "journal") as journal:
        model = make("llama")
        before = state_of(model)
        kill_after(1)
        with pytest.raises(Killed):
            ModelQuantizer(config, journal=journal).quantize_model(model, batches)
        assert_same(state_of(model), before)
        written = kill_after(0)
        ModelQuantizer(config, journal=journal).quantize_model(model, batches)
        assert len(written) == 1
        assert_same(state_of(model), expected)
        with pytest.raises(ValueError, match=r"another run: model\.tensors\.model\.layers\.0\..*"):
            changed = make("llama")
            changed.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
            ModelQuantizer(config, journal=journal).quantize_model(changed, batches)


def test_quantized_biases_do_not_reach_the_reference(
    make, build, batches, config_of, tmp_path, kill_after
):
    weights = scheme("int8_wo")
    layers = type(weights)(weight=weights.weight, bias=weights.weight)
    config = config_of("int8_wo", algo_config=[algo.QronosConfig()])
    config.global_quant_config = layers
    expected = state_of(ModelQuantizer(config).quantize_model(build("opt"), batches))
    with Journal(tmp_path / "journal") as journal:
        kill_after(1)
        with pytest.raises(Killed):
            ModelQuantizer(config, journal=journal).quantize_model(build("opt"), batches)
        model = ModelQuantizer(config, journal=journal).quantize_model(build("opt"), batches)
        assert_same(state_of(model), expected)


@pytest.fixture
def threads(monkeypatch):
    """Run a function in several threads that take the place of processes."""
    # Outside of threads, and in modules that are not told, there is one process.
    monkeypatch.setattr(journal_module, "joined", lambda: nullcontext(processes()))
    return threads_module.run


class TestSeveralProcesses:
    """Finished blocks of two processes, of which the second has no data, and of one."""

    NAMES = ("model.layers.0", "model.layers.1")

    def run(self, model, batches, place, stops=False, changes_first=True):
        """Run blocks that add one to a weight; return which blocks ran, and the last outputs."""
        names, ran = list(self.NAMES), []
        with Journal(place) as journal:
            journal.begin({})
            loop = run_blocks(model, names, batches, "test", journal=journal)
            for block in loop:
                ran.append(block.name)
                if not changes_first:
                    block.run()
                with torch.no_grad():
                    write_(block.module.mlp.up_proj.weight, block.module.mlp.up_proj.weight + 1)
                if stops and block.name == names[-1]:
                    loop.close()
                    break
        return ran, [model.get_submodule(n).mlp.up_proj.weight.clone() for n in names]

    @pytest.mark.parametrize("changes_first", [True, False])
    @pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 3)])
    def test_another_number_goes_on(
        self, build, batches, tmp_path, threads, first, second, changes_first
    ):
        model, data, place = build(), batches[:1], tmp_path / "journal"

        def work(stops):
            return self.run(deepcopy(model), data, place, stops, changes_first)

        expected = self.run(deepcopy(model), data, tmp_path / "other", True)
        stopped = threads(first, lambda: work(True))
        assert all(ran == list(self.NAMES) for ran, _ in stopped)
        assert len(list((place / "blocks").iterdir())) == 1
        for ran, weights in threads(second, lambda: work(False)):
            assert ran == [self.NAMES[1]]
            assert all(torch.equal(*pair) for pair in zip(weights, expected[1], strict=True))

    def test_each_process_checks_its_own_outputs(self, build, tmp_path, threads):
        data = [torch.full((1, 9), 3), torch.full((1, 12), 4)]  # a chunk for each process
        models, place, errors = [build(), build()], tmp_path / "journal", []
        self.run(build(), data, place, True)
        models[1].model.layers[0].mlp.down_proj.weight.data[0] += 1  # it computes other values

        def go_on():
            try:
                self.run(models[processes().rank], data, place)
            except ValueError as error:
                errors.append(f"{processes().rank}: {error}")
                raise

        with pytest.raises((ValueError, BrokenBarrierError)):
            threads(2, go_on)
        [error] = errors
        assert error.startswith("1: The outputs of model.layers.0 are not those of the run")


class TestFiles:
    """The files of the model between the run that was killed and the one that goes on."""

    @pytest.fixture
    def go_on(self, build, batches, config_of, tmp_path, kill_after):
        build().save_pretrained(tmp_path / "model", max_shard_size="100KB")
        config = config_of("int4_wo_32", algo_config=[algo.GPTQConfig()])

        def run(**options):
            model = stream_model(tmp_path / "model", **options)
            with Journal(tmp_path / "journal") as journal:
                ModelQuantizer(config, journal=journal).quantize_model(model, batches)

        kill_after(1)
        with pytest.raises(Killed):
            run()
        return run

    def shard(self, tmp_path):
        return max((tmp_path / "model").glob("model-*"))

    def test_missing(self, go_on, tmp_path):
        self.shard(tmp_path).unlink()
        with pytest.raises(FileNotFoundError, match="lacks model-"):
            go_on()

    def test_truncated(self, go_on, tmp_path):
        os.truncate(self.shard(tmp_path), 1000)
        with pytest.raises(ValueError, match="is damaged"):
            go_on()

    def test_changed(self, go_on, tmp_path):
        path = self.shard(tmp_path)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"model\.files\.{path.name}\.modified was \d+ and"):
            go_on()

    def test_in_another_type(self, go_on):
        with pytest.raises(ValueError, match=r'types\[0\] was "torch.float32" and is "torch.bfl'):
            go_on(dtype="bfloat16")

    def test_unchanged(self, go_on):
        go_on()


def test_a_machine_that_computes_other_values_is_refused(build, batches, tmp_path):
    names = ["model.layers.0", "model.layers.1"]
    model = build()

    def run(journal):
        journal.begin({})
        return [b.name for b in run_blocks(model, names, batches, "test", journal=journal)]

    with Journal(tmp_path / "journal") as journal:
        stopped = run_blocks(model, names, batches, "test", journal=journal)
        journal.begin({})
        next(stopped), next(stopped)
        stopped.close()
        assert run(journal) == names[1:]
        shutil.rmtree(tmp_path / "journal" / "blocks")
        (tmp_path / "journal" / "blocks").mkdir()
        journal.begin({})
        stopped = run_blocks(model, names, batches, "test", journal=journal)
        next(stopped), next(stopped)
        stopped.close()
        model.model.layers[0].mlp.up_proj.weight.data[0] += 1  # a value that no pass has changed
        with pytest.raises(ValueError, match=r"outputs of model\.layers\.0 are not those of"):
            run(journal)
