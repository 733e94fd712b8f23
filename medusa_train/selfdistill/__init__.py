"""Generation of training data with the target model itself (Medusa, Self-Distillation)."""
