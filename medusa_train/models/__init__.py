"""Target models, their attention, precision and adapters, and the drafts that read their hidden
states.
"""
