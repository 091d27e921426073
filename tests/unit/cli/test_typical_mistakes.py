"""Typical mistakes: each ends in a sentence that says what to type."""

import json

import pytest

QUANTIZE = ["quantize", "--model_dir", "MODEL", "--output_dir", "OUT"]
INTO_EXISTING = ["quantize", "--model_dir", "MODEL", "--output_dir", "EXISTS"]
FP8 = [*QUANTIZE, "--quant_scheme", "fp8"]


@pytest.fixture
def mistake(quark, model_dir, tmp_path, monkeypatch):
    """Call the command line in a directory with a MODEL, and an output that EXISTS."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EXISTS").mkdir()
    (tmp_path / "EXISTS" / "file").touch()
    (tmp_path / "MODEL").symlink_to(model_dir)
    (tmp_path / "other.json").write_text('{"quant_method": "awq", "bits": 4}', encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text("default_stage: {}", encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "short.txt").write_text("Hello.", encoding="utf-8")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "fields.json").write_text('[{"body": "x"}]', encoding="utf-8")
    (tmp_path / "notes.pdf").write_bytes(b"%PDF-1.4")
    (tmp_path / "damp.json").write_text('{"name": "gptq", "damp": 0.1}', encoding="utf-8")
    chat = '{"messages": [{"role": "user", "content": "Hi."}]}\n'
    (tmp_path / "chat.jsonl").write_text(chat, encoding="utf-8")
    (tmp_path / "BARE").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "BARE" / name).symlink_to(model_dir / name)

    def mistake(*call):
        result = quark(*call)
        assert result.exit_code == 2, result.output
        return result.stderr

    return mistake


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (["quantise"], "Did you mean 'quantize'?"),
        (["quantize"], "For example: quark quantize --model_dir llama --output_dir llama-int4 "),
        (["compare", "MODEL"], "For example: quark compare my-model my-model-int4 "),
        ([*QUANTIZE, "--quant_scheme", "fp9"], "Did you mean 'fp8'?"),
        ([*QUANTIZE, "--quant_scheme", "int4"], "Did you mean 'int4_wo_128'?"),
        (
            [*QUANTIZE, "--quant_scheme", "fp8", "--exclude_layers", "lm_head,*.0.*"],
            'Write spaces between patterns: "lm_head" "*.0.*"',
        ),
        (
            [*QUANTIZE, "--quant_scheme", "int4_wo_128", "--group_size", 64],
            "Give --quant_scheme int4_wo_64",
        ),
        # Options are judged before the output, which may well be replaced after all.
        ([*INTO_EXISTING, "--recipe", "int4"], "give --quant_scheme int4_wo_128."),
        ([*INTO_EXISTING, "--quant_scheme", "int3wo"], "Did you mean 'int3_wo_128'?"),
        ([*INTO_EXISTING, "--quant_scheme", "fp8", "--seq_len", 9999], "give 64 or less"),
        ([*INTO_EXISTING, "--quant_scheme", "fp8", "--device", "gpu"], "Give cpu, cuda or auto"),
        (
            [*QUANTIZE, "--quant_scheme", "AWQ"],
            "such as --quant_scheme int4_wo_128 --quant_algo awq",
        ),
        (
            [*QUANTIZE, "--quant_scheme", "fp8", "--config", "mixed.json"],
            "conflicts with --config: give one of them",
        ),
        ([*QUANTIZE, "--quant_scheme", "w4a17"], "Did you mean 'W4A16'?"),
        ([*QUANTIZE, "--quant_scheme", "fp8", "--quant_algo", "awk"], "Did you mean 'awq'?"),
        (
            [*QUANTIZE, "--quant_scheme", "int4_wo_32", "--custom_mode", "gguf"],
            "give --model_export gguf",
        ),
        (
            [*QUANTIZE, "--quant_scheme", "uint4_wo_32", "--model_export", "awq"],
            "give --custom_mode awq",
        ),
        (
            [*QUANTIZE, "--quant_scheme", "int8", "--custom_mode", "awq", "--plan"],
            "Exclude such layers, quantize them otherwise, or use custom_mode='quark'",
        ),
        (
            ["quantize", "--model_dir", "gone", "--output_dir", "OUT", "--quant_scheme", "fp8"],
            "download one with 'hf download OWNER/NAME --local-dir DIRECTORY'",
        ),
        (
            ["quantize", "--model_dir", "MODEL", "--output_dir", "EXISTS", "--quant_scheme", "fp8"],
            "Choose another directory, or",
        ),
        (
            [*QUANTIZE, "--quant_scheme", "fp8", "--seq_len", 9999],
            "the 64 tokens of the model: give 64 or less",
        ),
        (
            [*QUANTIZE, "--quant_scheme", "int4_wo_32", "--max_memory", "1MB"],
            "Give --max_memory ",
        ),
        ([*QUANTIZE, "--quant_scheme", "fp8", "--device", "gpu"], "Give cpu, cuda or auto"),
        (["convert", "MODEL", "EXISTS", "--to", "gguf"], "give --overwrite"),
        ([*QUANTIZE, "--quant_scheme", "int4_wo_24"], "Give --quant_scheme int4_wo_16"),
        ([*QUANTIZE, "--quant_scheme", "W4A16"], "Give --group_size 32"),
        ([*QUANTIZE, "--quant_scheme", "4bit"], "Did you mean 'int4_wo_128'?"),
        ([*QUANTIZE, "--quant_scheme", "nf4"], "Did you mean 'int4_wo_128'?"),
        (["serve", "MODEL"], "For example: vllm serve DIR"),
        (
            ["compare", "MODEL/model.safetensors", "MODEL"],
            "is a file. Give its directory: MODEL",
        ),
        (
            [*QUANTIZE, "--quant_scheme", "int4_wo_24", "--custom_mode", "awq"],
            "Give --quant_scheme int4_wo_16",
        ),
        ([*QUANTIZE, "--config", "other.json"], "it is a configuration of awq. Give the JSON of"),
        ([*QUANTIZE, "--config", "recipe.yaml"], "docs/from-other-tools.md names the schemes"),
        ([*QUANTIZE, "--config", "MODEL/config.json"], "or --quant_scheme instead"),
        (["convert", "MODEL", "OUT", "--to", "awq"], "quark quantize --model_dir MODEL --output"),
        (["report", "MODEL"], "quark quantize --model_dir MODEL --output_dir OUT --quant_scheme"),
        ([*QUANTIZE, "--quant_scheme", "int4_wo"], "Did you mean 'int4_wo_128'?"),
        ([*QUANTIZE, "--quant_scheme", "fp8", "--data_type", "bf16"], "Did you mean 'bfloat16'?"),
        ([*QUANTIZE, "--quant_scheme", "fp8", "--dataset", "my.txt"], "Give a text file such as"),
        (
            ["quantize", "--model_dir", "BARE", "--output_dir", "OUT", "--quant_scheme", "int8_wo"],
            "Copy the files of the tokenizer from the original model to this directory",
        ),
        (
            [*QUANTIZE, "--quant_scheme", "fp8", "--custom_mode", "awq"],
            "It holds --quant_scheme int4_wo_128, for example",
        ),
        (
            [*QUANTIZE, "--quant_scheme", "fp8", "--model_export", "gguf", "--plan"],
            "It holds --quant_scheme int4_wo_128, for example",
        ),
        ([*QUANTIZE, "--quant_scheme", "int4wo"], "Did you mean 'int4_wo_128'?"),
        ([*QUANTIZE, "--quant_scheme", "int8wo-128"], "Did you mean 'int8_wo_128'?"),
        ([*QUANTIZE, "--quant_scheme", "NVFP4_DEFAULT_CFG"], "Did you mean 'nvfp4'?"),
        ([*QUANTIZE, "--quant_scheme", "FP8_DEFAULT_CFG"], "Did you mean 'fp8'?"),
        ([*QUANTIZE, "--quant_scheme", "Q4_K_M"], "Did you mean 'q4_k'?"),
        ([*QUANTIZE, "--bits", "4"], "Give one, such as --quant_scheme int4_wo_128"),
        ([*QUANTIZE, "--load_in_8bit"], "Give one, such as --quant_scheme ptpc_int8;"),
        ([*FP8, "--dataset", "empty.txt"], "there is no text in empty.txt. Give a text file"),
        (
            [*FP8, "--dataset", "short.txt"],
            "give more text or shorter windows, such as --seq_len 7",
        ),
        ([*FP8, "--dataset", "binary.txt"], "is not UTF-8 text"),
        ([*FP8, "--dataset", "fields.json"], "Give the text of each record in 'text'"),
        ([*FP8, "--dataset", "chat.jsonl"], "add a file chat_template.jinja"),
        ([*FP8, "--dataset", "MODEL"], "is no data set"),
        ([*FP8, "--device", "cuda:9"], "Give cpu or auto"),
        (
            [*FP8, "--output_dir", "MODEL", "--overwrite"],
            "contains the model. Choose another directory",
        ),
        ([*FP8, "--output_dir", "empty.txt"], "is a file. Choose a directory"),
        ([*FP8, "--log_file", "no/where.log"], "cannot be written"),
        (["quantize", "MODEL", "OUT", "--quant_scheme", "fp8"], "quark quantize --model_dir llama"),
        # Names of llm-compressor, AutoAWQ, GPTQModel, bitsandbytes, llama.cpp and Transformers.
        ([*QUANTIZE, "--scheme", "W4A16"], "Give --quant_scheme."),
        ([*FP8, "--ignore", "lm_head"], "Give --exclude_layers."),
        ([*FP8, "--max_seq_length", 2048], "Give --seq_len."),
        ([*FP8, "--num_calibration_samples", 512], "Give --num_calib_data."),
        ([*FP8, "--calib-data", "pileval"], "Give --dataset."),
        ([*FP8, "--save_path", "OUT"], "Give --output_dir."),
        (["quantize", "--model", "MODEL"], "Give --model_dir."),
        ([*QUANTIZE, "--w_bit", 4, "--zero_point"], "such as --quant_scheme int4_wo_128"),
        ([*FP8, "--no_weight_matrix_merge"], "Leave it out."),
        ([*FP8, "--model_export", "quark_safetensors"], "Give --model_export hf_format."),
        (["compare", "MODEL", "MODEL", "--num_eval_data", 4], "Give --limit."),
        (["evaluate", "MODEL", "--eval_data", "short.txt"], "Give --dataset."),
        (
            ["quantize", "--model_dir", "BARE", "--output_dir", "OUT", "--quant_scheme", "int8_wo"],
            "Or give --skip_evaluation: this scheme needs no text.",
        ),
        ([*FP8, "--desc_act"], "Give --quant_algo_config_file FILE"),
        (["evaluate", "--model_args", "pretrained=MODEL"], "For example: quark evaluate my-model"),
        (["demo", "--model", "MODEL"], "Possible options: --help, --real"),
        (["export", "MODEL", "OUT"], "give quark convert"),
        ([*FP8, "--quant_algo", "AWQModifier"], "Give --quant_algo awq."),
        ([*FP8, "--quant_algo", "spinquant"], "Give --pre_quantization_optimization rotation."),
        ([*FP8, "--quant_algo", "rtn"], "Give no --quant_algo"),
        ([*FP8, "--model_export", "safetensors"], "Give --model_export hf_format."),
        ([*FP8, "--custom_mode", "pack-quantized"], "Give --custom_mode compressed-tensors."),
        (["convert", "MODEL", "OUT", "--to", "safetensors"], "Give --to quark."),
        ([*FP8, "--kv_cache_dtype", "int8"], "Give int8_per_tensor_static, "),
        ([*FP8, "--kv_cache_dtype", "int4"], "Give int4_per_head or int4_per_token_head."),
        ([*FP8, "--kv_cache_dtype", "fp8_e5m2"], "Did you mean 'fp8'?"),
        ([*FP8, "--kv_cache_dtype", "auto"], "Leave it out."),
        ([*QUANTIZE, "--quant_scheme", "fp8_e4m3"], "Did you mean 'fp8'?"),
        ([*QUANTIZE, "--quant_scheme", "W8A8_FP8"], "Did you mean 'ptpc_fp8'?"),
        ([*FP8, "--trust-remote-code", "True"], "is given without a value. Leave 'True' out."),
        ([*FP8, "--verify", "false"], "Leave '--verify false' out."),
        ([*FP8, "--batch_size", "auto"], "expected a whole number, such as --batch_size 1."),
        (["evaluate", "MODEL", "--limit", "all"], "Maximum number of windows (0 = all)."),
        (["schemes", "int4", "fp8"], "Unexpected argument 'fp8'. For example: quark schemes"),
        (["schemes", "int9"], "no scheme has 'int9' in its name"),
        (["quark", "schemes", "--all"], "Give 'quark' once: quark schemes --all"),
        (["MODEL", "--quant_scheme", "fp8"], "Give a verb before it: quark inspect MODEL"),
        (["version"], "give quark --version"),
        (["install"], "quark has no verb 'install'. Verbs: demo, quantize, sample, collect"),
        (["convert", "MODEL", "OUT", "--custom_mode", "awq"], "Give --to."),
        ([*FP8, "--data_type", "half"], "Give --data_type float16."),
        ([*FP8, "--data_type", "int8"], "Give --data_type auto: it is the type of the float model"),
        ([*QUANTIZE, "--quant_scheme", "fp16"], "is a type of floats, not a scheme."),
        ([*QUANTIZE, "--quant_scheme", "int8dq"], "Did you mean 'ptpc_int8'?"),
        ([*QUANTIZE, "--recipe", "gptq"], "--quant_scheme int4_wo_128 --quant_algo gptq."),
        ([*FP8, "--seq_len", 0], "expected at least 2"),
        (["search", "--model_dir", "MODEL", "--target_bits", "4bit"], "expected a number."),
        (["merge", "MODEL", "--output_dir", "OUT"], "Give a directory that 'quark collect' wrote."),
        (["report", "MODEL", "--output", "EXISTS"], "Give the name of a file in it."),
        (["inspect", "short.txt"], "short.txt is of no known kind"),
        (
            [*FP8, "--dataset", "short.txt,empty.txt"],
            "Give each source its share, such as short.txt:0.5,empty.txt:0.5",
        ),
        ([*FP8, "--dataset", "shorrt.txt"], "Did you mean 'short.txt'?"),
        ([*FP8, "--dataset", "notes.pdf"], "Save its text as .txt"),
        (
            [*FP8, "--layer_quant_scheme", "int4_wo_32", "*q_proj"],
            "the pattern comes first: --layer_quant_scheme '*q_proj' int4_wo_32",
        ),
        ([*FP8, "--exclude_layers", "*"], "Name fewer, such as lm_head."),
        (
            [*FP8, "--quant_algo", "gptq", "--quant_algo_config_file", '{"name": "gptq"}'],
            "Write this JSON to a file, and give its name.",
        ),
        (
            [*FP8, "--quant_algo", "gptq", "--quant_algo_config_file", "damp.json"],
            "Did you mean 'damp_percent'?",
        ),
        (
            [*QUANTIZE, "--quant_scheme", "int4_awq"],
            "Give --quant_scheme int4_wo_128 --quant_algo awq.",
        ),
        (
            [*QUANTIZE, "--quant_scheme", "int4_wo_128", "--group_size", 128],
            "or fixes their size. Leave it out.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_advice(call, advice, mistake, tmp_path):
    assert advice in " ".join(mistake(*call).split())
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("OUT")]


def test_quiet_json_is_json_alone(quark, model_dir, tmp_path):
    """A place with spaces and letters of other scripts, too."""
    output = tmp_path / "a b" / "größe 模型"
    flags = ["--quant_scheme", "int8_wo", "--skip_evaluation", "--quiet", "--json"]
    result = quark("quantize", "--model_dir", model_dir, "--output_dir", output, *flags)
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["output"] == str(output)
    assert (output / "config.json").is_file()


def test_flags_of_data_that_is_not_read_are_warned_of(quark, model_dir, text, tmp_path):
    flags = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", "--dataset", text]
    result = quark("quantize", *flags, "--quant_scheme", "int8_wo", "--skip_evaluation")
    assert result.exit_code == 0, result.output
    assert "warning: --dataset: no effect, since this scheme needs no data." in result.stderr
