"""`quark demo`: a model under several schemes, side by side."""
