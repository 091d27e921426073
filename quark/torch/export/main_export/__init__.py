"""Names that Transformers imports from here."""
