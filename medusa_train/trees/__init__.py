"""Trees of guesses and the cache that verifies them; knows no model and no draft."""
