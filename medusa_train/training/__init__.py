"""Training: setup, the training loop, distributed strategies, validation and the state of a run."""
