"""What a run trained, as directories that other programs load; knows no training and no decoding."""
