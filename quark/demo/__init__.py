"""A small trained model and its text, for demonstrations without a download."""
