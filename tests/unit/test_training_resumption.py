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
from quark.torch.training import distillation_loss

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

    def trainer(kind, make=Trainer, **options):
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
        return make(model, arguments, train_dataset=DATA)

    return trainer


@pytest.mark.parametrize("kind", ["int8", "lsq", "nvfp4", "int4_wo_32", "mxfp4"])
@pytest.mark.sampled(5)
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


@pytest.mark.parametrize("kind", ["int4_wo_32", "mxfp4"])
def test_distillation_goes_on_from_every_checkpoint(trainer, build, tmp_path, kind):
    """The loss of ``Trainer`` is overridden, as docs/training.md does; nothing else is."""
    from transformers import Trainer

    teacher = build().eval()

    class Distiller(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **options):
            outputs = model(**inputs)
            with torch.no_grad():
                target = teacher(**inputs).logits
            loss = distillation_loss(outputs.logits, target)
            return (loss, outputs) if return_outputs else loss

    whole = trainer(kind, Distiller, max_steps=3, save_strategy="steps", save_steps=1)
    whole.train()
    expected = whole.model.state_dict()
    steps = [step for step in (1, 2) if (tmp_path / "run" / f"checkpoint-{step}").is_dir()]
    assert steps == [1, 2]
    for step in steps:
        other = trainer(kind, Distiller, max_steps=3)
        other.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        state = other.model.state_dict()
        assert [k for k in state if not torch.equal(state[k], expected[k])] == []
    weights = dict(build().named_parameters())
    assert any(not torch.equal(p, weights[n]) for n, p in whole.model.named_parameters())


def test_only_models_that_train_are_saved(build, batches, tmp_path):
    model = ModelQuantizer(config_of("int8")).quantize_model(build(), batches)
    for each in (model, ModelQuantizer.freeze(model)):
        with pytest.raises(ValueError, match="save_pretrained cannot write a quantized model"):
            each.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
