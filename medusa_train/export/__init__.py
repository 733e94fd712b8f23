"""Export of trained heads and backbones to directories that other programs load."""
