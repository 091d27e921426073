"""Evaluation of models: perplexity, and tasks of lm-evaluation-harness."""
