"""The four commands; thin, and everything heavy is imported inside the command."""
