"""Products of inputs and packed weights, without a float copy of the weight."""
