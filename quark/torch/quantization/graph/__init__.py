"""Graph mode at its documented import path."""
