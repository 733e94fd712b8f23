"""Export of trained heads and target models to directories that other programs load."""
