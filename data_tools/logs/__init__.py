"""From what a user names to records: sources, compression, lines, tables, JSON text."""
