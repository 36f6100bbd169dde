"""Objectives: one gradient, each with its own coefficient, composed of values.

`parts` and `composition` are plain data and import no torch; the other modules hold the mathematics.
"""
