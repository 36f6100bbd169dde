"""A policy as a model directory: loading, log-probs, scoring, saving."""
