"""In a wheel this package holds `configs/` and `data/` (pyproject.toml); in a clone it is empty."""
