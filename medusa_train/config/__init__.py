"""Configuration: the keys (schema.py), reading them (load.py) and finding files (paths.py). No torch in here."""
