"""Options of an export."""
