"""`cbserve sim`: one simulated run, or a grid of them, from the command line to a table, a trace and a report."""
