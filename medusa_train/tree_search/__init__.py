"""Choose the tree for decoding with a draft: trace answers, fit trees, time steps, and show the
choice.
"""
