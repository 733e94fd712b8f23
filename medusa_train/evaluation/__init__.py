"""Measuring a backbone with its draft heads: benches, timed decoding, exactness and the report."""
