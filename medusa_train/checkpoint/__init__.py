"""Nothing lost: training checkpoints written whole or not at all, and head files in the layouts that others read."""
