"""Fuzz targets: a function that takes any bytes, run by libFuzzer and, on its corpus, as a test."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_test")

def fuzz_target(name, deps):
    """Declares NAME, the fuzzer, and NAME_test, which runs the files of corpus/NAME once.

    Args:
      name: of NAME.cc, which defines LLVMFuzzerTestOneInput.
      deps: what NAME.cc includes.
    """
    cc_binary(
        name = name,
        testonly = True,
        srcs = [name + ".cc"],
        linkopts = ["-fsanitize=fuzzer"],
        # GCC has no libFuzzer: only --config=fuzz and --config=fuzz_fast can link this.
        tags = ["manual"],
        deps = deps,
    )
    cc_test(
        name = name + "_test",
        size = "small",
        srcs = [name + ".cc", "replay.cc"],
        args = ["tests/fuzz/corpus/" + name],
        data = native.glob(["corpus/%s/*" % name]),
        deps = deps,
    )
