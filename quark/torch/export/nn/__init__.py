"""Names that other software imports from here."""
