"""Evaluation of a backbone with its draft heads: benches, timed decoding, output equality,
calibration, reports.
"""
