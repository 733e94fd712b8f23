"""Evaluation of a target model with its draft heads: benchmarks, timed decoding, output equality,
calibration, reports.
"""
