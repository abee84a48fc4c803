"""How an output crosses the ranks, where it is not one whole all-reduce: one wire a file."""
