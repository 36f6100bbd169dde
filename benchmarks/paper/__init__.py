"""arXiv 2509.24203 at small scale: which of its findings hold on tiny policies, see `__main__.py`."""
