"""Training with ``Trainer`` of Transformers, unchanged, that is interrupted and goes on."""

import pytest
import torch

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    Config,
    QATSpec,
    QuantizationConfig,
    QuantizationSpec,
)
from quark.torch.quantization.config.presets import scheme

ROWS = torch.randint(3, 64, (10, 12), generator=torch.Generator().manual_seed(7))
DATA = [{"input_ids": row, "labels": row} for row in ROWS]


def config_of(kind):
    if kind != "lsq":
        return Config(scheme(kind), exclude=["lm_head"])
    tensor = QuantizationSpec("int8", qscheme="per_tensor", symmetric=True, qat_spec=QATSpec())
    return Config(QuantizationConfig(weight=tensor, input_tensors=tensor), exclude=["lm_head"])


@pytest.fixture
def trainer(build, batches, tmp_path):
    from transformers import Trainer, TrainingArguments

    def trainer(kind, **options):
        model = ModelQuantizer(config_of(kind)).quantize_model(build(), batches)
        arguments = TrainingArguments(
            str(tmp_path / "run"),
            per_device_train_batch_size=2,
            learning_rate=3e-3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **{"max_steps": 5, "save_strategy": "no", **options},
        )
        return Trainer(model, arguments, train_dataset=DATA)

    return trainer


@pytest.mark.parametrize("kind", ["int8", "lsq", "nvfp4"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(trainer, tmp_path, kind):
    whole = trainer(kind)
    whole.train()
    first = trainer(kind, save_strategy="steps", save_steps=3)
    first.train()
    checkpoint = tmp_path / "run" / "checkpoint-3"
    stored = {p.name for p in checkpoint.iterdir()}
    assert "model.safetensors" in stored and "optimizer.pt" in stored
    second = trainer(kind)
    second.train(resume_from_checkpoint=str(checkpoint))
    expected, state = whole.model.state_dict(), second.model.state_dict()
    assert expected.keys() == state.keys()
    assert [k for k in state if not torch.equal(state[k], expected[k])] == []
    for each in (whole, second):
        ModelQuantizer.freeze(each.model.eval())
    x = ROWS[:2]
    assert torch.equal(whole.model(x).logits, second.model(x).logits)


def test_only_models_that_train_are_saved(build, batches, tmp_path):
    model = ModelQuantizer(config_of("int8")).quantize_model(build(), batches)
    for each in (model, ModelQuantizer.freeze(model)):
        with pytest.raises(ValueError, match="save_pretrained cannot write a quantized model"):
            each.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
