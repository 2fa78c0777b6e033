"""A simulation of gradient synchronization; README.md and `simulate --help` explain it."""
