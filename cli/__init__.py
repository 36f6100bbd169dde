"""The command line `rec`: one file a command, each a thin skin over the two libraries."""
