r"""Quantize a language model: ``quark quantize`` with the documented defaults.

    python quantize_quark.py --model_dir MODEL --output_dir OUT --quant_scheme fp8 \
        --kv_cache_dtype fp8 --num_calib_data 512 --model_export hf_format --tasks gsm8k,wikitext

Nothing is written without --model_export or --quant_flow file2file. Calibration and evaluation text
come from the Hugging Face Hub unless --dataset and --eval_data name files. docs/command-line.md
lists all flags.
"""

import sys

from quark.cli.main import main

DEFAULTS = {
    "model_attn_implementation": "eager",
    "dataset": "pileval",
    "num_calib_data": 512,
    "scale_format": "e4m3",
    "model_export": [],
    "eval_data": "wikitext",
    "eval_seq_len": 2048,
    "num_eval_data": -1,
    "eval_batch_size": "1",
}

if __name__ == "__main__":
    main(["quantize", *sys.argv[1:]], {"quantize": DEFAULTS})
