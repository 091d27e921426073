"""Names of the tensors of a layer: in configurations, in the state of a model, in checkpoints."""

PARAMETERS = ("weight", "bias")
# Tensor of the configuration -> its name in the state of a layer.
SHORT_NAMES = {
    "weight": "weight",
    "bias": "bias",
    "input_tensors": "input",
    "output_tensors": "output",
}
# Parameters of a layer in float beside these, or None; see ``QuantizedLayer``.
PRESCALE, LOW_RANK = "input_prescale", ("low_rank_down", "low_rank_up")
GROUPS = "groups"  # part of a tensor: group of each input, int32 (inputs,)
