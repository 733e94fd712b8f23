"""Choose the tree that heads are decoded with: trace answers, fit trees, time steps, and show the
choice.
"""
