"""Drift: how two selections of logged responses differ, in numbers with effect sizes."""
