"""Self-contained HTML pages of an evaluation, a calibration and a comparison, rendered from their JSON files."""
