"""Generation of training data with the base model itself (Medusa, Self-Distillation)."""
