"""The report as one self-contained page; a pure function of the JSON beside it. Knows no model and no record."""
