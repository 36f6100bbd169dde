"""Rows of a dataset as training sees them: token ids, index, order, snapshot."""
