"""Where `configs/` and `data/` of the project lie in an installed wheel (pyproject.toml puts them here); else empty."""
