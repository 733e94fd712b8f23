"""Evaluation of a target model with its draft heads: benches, timed decoding, output equality,
calibration, reports.
"""
