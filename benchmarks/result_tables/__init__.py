"""Answers, tables and short answers of the result pages, from their JSON; tables.py writes them."""
