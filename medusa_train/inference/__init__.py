"""Decoding with a draft and choosing its tree; knows nothing of training, datasets or reports."""
