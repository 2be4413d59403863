"""The version of evenpack, alone in a module that every other may import."""

__version__ = "0.1.0"
