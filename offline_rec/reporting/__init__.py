"""Reports: one self-contained HTML page about a dataset or a run, made by SQL and without torch."""
