"""Which layer gets which format, when not all get the same."""
