"""What can be learned of a model by running it; knows no architecture."""
