"""Backbones and the drafts that read them; knows nothing of data, losses, training or decoding loops."""
