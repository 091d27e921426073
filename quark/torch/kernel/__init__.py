"""Conversions of MX formats, by the names that serving software imports."""
