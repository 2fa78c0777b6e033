"""A model of gradient synchronization on paper; README.md and `simulate --help` explain it."""
