"""Names that serving software imports from here."""
