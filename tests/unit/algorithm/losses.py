"""What quantized layers lose, from the inputs and outputs of the float model."""

import re
from collections import defaultdict

import torch

from tests.models.architectures import tokens

BATCHES = [tokens(40), tokens(60)]
# Layers that read one tensor each, by their names in several architectures.
READERS = {
    "attention": ("q_proj", "k_proj", "v_proj", "attn.c_attn"),
    "values": ("o_proj", "attn.c_proj"),
    "into the mlp": ("gate_proj", "up_proj"),
    "out of the mlp": ("down_proj", "fc2"),
}
CASES = [
    *(("llama", readers) for readers in READERS),
    ("opt", "out of the mlp"),
    ("gpt2", "attention"),
    ("gpt2", "values"),
    ("nemotron", "out of the mlp"),
]


@torch.no_grad()
def watch(model, names, look):
    """Run all batches while ``look(name, inputs, outputs)`` sees the named modules' tokens."""

    def hook(name):
        return lambda m, args, y: look(name, args[0].flatten(0, -2), y.flatten(0, -2))

    handles = [model.get_submodule(n).register_forward_hook(hook(n)) for n in names]
    for batch in BATCHES:
        model(batch)
    for handle in handles:
        handle.remove()


class Judge:
    """Knows what some layers of a float model return, and what they lose when quantized.

    Args:
        context: The model; other layers are left out of it.
        readers: Which layers.
    """

    def __init__(self, context, readers):
        for name in [n for n in context.layers if not n.endswith(READERS[readers])]:
            context.layers[name].weight_quantizer.enabled = False
            del context.layers[name]
        self.context, self.exact = context, defaultdict(list)
        watch(context.model, context.layers, lambda n, x, y: self.exact[n].append(y.clone()))

    def losses(self, power=2, relative=False):
        """Sum of what layers lose, by block, inputs rounded too where they are quantized."""
        by_block, seen = defaultdict(float), defaultdict(list)
        watch(self.context.model, self.context.layers, lambda n, x, y: seen[n].append(x))
        for name, inputs in seen.items():
            layer, exact = self.context.layers[name], torch.cat(self.exact[name])
            x, bias = torch.cat(inputs), 0 if layer.bias is None else layer.bias
            x = x if layer.input_quantizer is None else layer.input_quantizer.fake_quantize_copy(x)
            found = layer.product(
                x, layer.weight_quantizer.fake_quantize_copy(layer.weight), layer.bias
            )
            loss = float((found - exact).detach().abs().pow(power).sum())
            whole = float((exact - bias).detach().abs().pow(power).sum()) if relative else 1
            by_block[re.match(r".*?\.\d+", name)[0]] += loss / whole
        return by_block
