"""GGUF files that the package of llama.cpp writes."""


def write_gguf(path, source, kinds):
    """Write a file again by the package of llama.cpp, some tensors as blocks of other types."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        kind = next((kind for part, kind in kinds.items() if part in tensor.name), None)
        number, data = tensor.tensor_type, tensor.data
        if kind is not None:
            number = gguf.GGMLQuantizationType[kind]
            data = gguf.quantize(gguf.dequantize(data, tensor.tensor_type), number)
        writer.add_tensor(tensor.name, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
