"""Train, evaluate and ship Medusa heads. This module knows only the version."""

__version__ = "0.1.0"
