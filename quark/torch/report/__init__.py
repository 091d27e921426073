"""What a model is made of, for people and for programs."""
