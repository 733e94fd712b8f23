"""Self-distillation: the model answers prompts itself, and its answers become training data."""
