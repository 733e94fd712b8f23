"""The configuration of every command: keys, loading, constraints and generated documentation."""
