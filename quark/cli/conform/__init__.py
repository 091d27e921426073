"""The verb ``quark conform``."""
