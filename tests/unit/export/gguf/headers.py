"""GGUF files that have a header alone, with a tokenizer of five tokens."""

TOKENS = ["<s>", "</s>", "a", "b", "ab"]


def write_header(path, changes):
    """Write a file; ``changes`` has a value and the name of its type by key, None for no value."""
    import gguf

    values = {
        "tokenizer.ggml.model": ("llama", "STRING"),
        "tokenizer.ggml.pre": ("default", "STRING"),
        "tokenizer.ggml.tokens": (TOKENS, "STRING"),
        "tokenizer.ggml.token_type": ([3, 3, 1, 1, 1], "INT32"),
        "tokenizer.ggml.scores": ([0.0, -1.0, -2.0, -3.0, -4.0], "FLOAT32"),
        "tokenizer.ggml.bos_token_id": (0, "UINT32"),
        **changes,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, entry in values.items():
        if entry is None:
            continue
        value, kind = entry[0], gguf.GGUFValueType[entry[1]]
        is_array = isinstance(value, list)
        writer.add_key_value(
            key, value, gguf.GGUFValueType.ARRAY if is_array else kind, kind if is_array else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path
