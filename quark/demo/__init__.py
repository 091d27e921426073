"""A small trained model and text for it: everything a demonstration needs, without a download."""
