"""Decoding steps on fixed memory, which CUDA graphs capture and replay; on a CPU nothing here is
needed.
"""
