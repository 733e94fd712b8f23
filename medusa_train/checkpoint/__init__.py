"""Training checkpoints, run directories, and draft heads in the file layouts of other programs."""
