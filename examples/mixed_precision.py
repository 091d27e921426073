r"""Choose a format for each layer within a budget of bits, quantize, and write a report.

    python examples/mixed_precision.py --output_dir OUT --target_bits 4
    python examples/mixed_precision.py --model_dir MODEL --output_dir OUT

MODEL is a directory, or a name on the Hugging Face Hub; without it, the model of this package. OUT
is a checkpoint for Transformers; `OUT.html` shows every layer. Needs the extra `report`.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from quark.demo.text import calibration_documents, model_directory
from quark.torch import LLMTemplate, ModelQuantizer, collect_statistics, export_safetensors
from quark.torch.evaluation.perplexity import token_windows
from quark.torch.quantization import GPTQConfig
from quark.torch.report.measurement import measure
from quark.torch.report.page import page
from quark.torch.search.mixtures import Mixture, measure_costs, mixed_config

TOKENS, HELD_OUT = 512, 4  # tokens of a window, windows that the report measures
SCHEMES = ("int3_wo_64", "int4_wo_64", "int8_wo_64")


def main() -> None:
    """Collect statistics once; search, quantize, write, and measure with them."""
    parser = argparse.ArgumentParser(description="Quantize each layer in a format of its own.")
    parser.add_argument("--model_dir", default=model_directory())
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--target_bits", type=float, default=4.0, help="bits per weight, at most")
    parser.add_argument("--samples", type=int, default=128, help="windows of calibration text")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model_dir, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(options.model_dir)
    count = options.samples + HELD_OUT
    windows = token_windows(calibration_documents(), tokenizer, TOKENS, count)

    statistics = collect_statistics(model, windows[HELD_OUT:].split(1))
    template = LLMTemplate.get(model.config.model_type)
    formats = {name: template.get_config(scheme=name).global_quant_config for name in SCHEMES}
    mixture = Mixture(measure_costs(model, statistics, formats, solved=True))
    config = mixed_config(model, mixture.choose(options.target_bits), formats)
    config.algo_config = [GPTQConfig()]
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(model, statistics=statistics))
    export_safetensors(model, options.output_dir, tokenizer=tokenizer)

    report = measure(options.output_dir, options.model_dir, windows[:HELD_OUT]).to_dict()
    print(*report["verdict"], sep="\n")
    options.output_dir.with_suffix(".html").write_text(page(report), encoding="utf-8")


if __name__ == "__main__":
    main()
