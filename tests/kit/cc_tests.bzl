"""Tests in C++, and what they share: each in a file of its name."""

def cc_tests(tests, deps = [], main = "@googletest//:gtest_main", size = "small", **attributes):
    """A cc_test of NAME.cc for each name.

    Args:
      tests: the names; or a dict, from each name to what that test alone depends on.
      deps: what all of them depend on.
      main: the library with their main().
      size: of each test.
      **attributes: others that all of them have.
    """
    for name in tests:
        native.cc_test(
            name = name,
            size = size,
            srcs = [name + ".cc"],
            deps = deps + (tests[name] if type(tests) == "dict" else []) + [main],
            **attributes
        )

def test_library(name, **attributes):
    """A cc_library of NAME.h and, where there is one, NAME.cc."""
    native.cc_library(
        name = name,
        testonly = True,
        srcs = native.glob([name + ".cc"], allow_empty = True),
        hdrs = [name + ".h"],
        **attributes
    )
