"""Lineage, both ways: which updates used a row, which rows made an update, and which weights hold them."""
