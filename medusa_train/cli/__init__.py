"""The commands. Heavy imports happen inside the functions, so that usage errors appear at once."""
