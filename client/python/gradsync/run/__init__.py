"""Starts the ranks of a job on this node, and a daemon if none runs: python -m gradsync.run --help.

A launch goes through these files: command_line (what is asked for), launch (what happens, in
order), daemon (whose daemon), ranks (what a rank gets), process (one process), events (what it and
the user do), output (what is shown), failure (who failed first), restart_pauses (when a rank is
started again).
"""
