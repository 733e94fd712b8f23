"""Training: the loop, its optimizer, its place in the data, and what a finished run leaves behind."""
