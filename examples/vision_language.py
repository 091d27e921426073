r"""Quantize the language model of a vision-language model, on pictures and a request.

    python examples/vision_language.py --output_dir OUT
    python examples/vision_language.py --model_dir MODEL --images DIR --output_dir OUT

MODEL is a directory, or a name on the Hugging Face Hub; without it, a small model with random
weights and a picture of noise. OUT is a checkpoint for Transformers. Needs Pillow.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers as tf
from PIL import Image

from quark.demo.text import model_directory
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.evaluation.samples import make_batches, read_samples


def make_material(folder: Path) -> None:
    """Write a small Llava with its processor, and a picture, to a folder."""
    tokenizer = tf.AutoTokenizer.from_pretrained(model_directory(), image_token="<image>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    vision = tf.CLIPVisionConfig(num_attention_heads=4, image_size=224, patch_size=56, **sizes)
    text = tf.LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, **sizes)
    token = tokenizer.image_token_id
    config = tf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=token)
    tf.LlavaForConditionalGeneration(config).save_pretrained(folder)
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = tf.LlavaProcessor(tf.CLIPImageProcessor(), tokenizer, patch_size=56, **options)
    processor.save_pretrained(folder)
    Image.effect_noise((40, 30), 60).convert("RGB").save(folder / "picture.png")


def main() -> None:
    """Quantize and write."""
    parser = argparse.ArgumentParser(description="Quantize a vision-language model.")
    parser.add_argument("--model_dir")
    parser.add_argument("--images", help="directory of pictures")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--samples", type=int, default=128, help="maximum number of pictures")
    options = parser.parse_args()
    with TemporaryDirectory(ignore_cleanup_errors=True) as made:  # Windows: files are mapped
        if options.model_dir is None:
            make_material(Path(made))
        path = options.model_dir or made
        model = tf.AutoModelForImageTextToText.from_pretrained(path, dtype="auto")
        processor = tf.AutoProcessor.from_pretrained(path)
        batches = make_batches(read_samples(options.images or made, options.samples), processor)

    # The tower and the projector stay in float; float_parts=["projector"] quantizes the tower too.
    config = LLMTemplate.get(model.config.model_type).get_config(scheme="fp8")
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, batches))
    export_safetensors(model, options.output_dir, tokenizer=processor)


if __name__ == "__main__":
    main()
