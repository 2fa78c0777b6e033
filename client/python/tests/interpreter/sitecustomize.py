"""Every Python that a test starts runs this first, so that PyTorch costs half as much.

Importing PyTorch makes a million objects. Python's collector looks at them again and again while
they are made (0.65 s of CPU), and once more when the process ends (0.5 s). So the collector comes
less often, and the end skips what lives until then. gc.collect() does what it always does.

ends_test, which is about a process's end, does without.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 100)
# Registered first, so it runs last, after the exit functions that tests are about.
atexit.register(gc.freeze)
