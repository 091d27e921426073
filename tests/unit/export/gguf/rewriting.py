"""GGUF files that the package of llama.cpp writes."""

LAYOUT_OF = {"IQ4_NL": "Q4_0"}  # the package does not quantize IQ4_NL, which has this layout


def write_gguf(path, source, kinds=None, names=None, without=()):
    """Write a file again by the package of llama.cpp.

    Args:
        path: The new file.
        source: The file to read.
        kinds: A part of the names of tensors -> type of the blocks that they become.
        names: Name of a tensor -> its new name.
        without: Keys of the header that are left out.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", *without):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        kind = next((k for part, k in (kinds or {}).items() if part in tensor.name), None)
        number, data = tensor.tensor_type, tensor.data
        if kind is not None:
            layout = gguf.GGMLQuantizationType[LAYOUT_OF.get(kind, kind)]
            data = gguf.quantize(gguf.dequantize(data, number), layout)
            number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor((names or {}).get(tensor.name, tensor.name), data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
