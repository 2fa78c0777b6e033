"""Keeps a context on each GPU until standard input ends: held_context.py LIBCUDA. Without any
context the driver may unload its state, and each new process would wait for it.
"""

import ctypes
import sys

driver = ctypes.CDLL(sys.argv[1])
count, context = ctypes.c_int(), ctypes.c_void_p()
driver.cuInit(0)
driver.cuDeviceGetCount(ctypes.byref(count))
for ordinal in range(count.value):
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal)
sys.stdin.read()
