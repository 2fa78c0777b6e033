"""google/rpc/*.proto of PyPI's googleapis-common-protos, as tools/setup puts it into .venv."""

_PROTOS = ["code", "error_details", "status"]

def _googleapis_impl(ctx):
    # Read so that a new pin fetches this repository again.
    ctx.read(Label("//tools:requirements.txt"))
    lib = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv").get_child("lib")
    found = None
    for python in (lib.readdir() if lib.exists else []):
        rpc = python.get_child("site-packages").get_child("google").get_child("rpc")
        if rpc.get_child("status.proto").exists:
            found = rpc
    if not found:
        fail("googleapis-common-protos is not in %s. Run tools/setup." % lib)
    for proto in _PROTOS:
        ctx.symlink(found.get_child(proto + ".proto"), "google/rpc/%s.proto" % proto)
    ctx.symlink(ctx.attr.build_file, "BUILD.bazel")

googleapis_repository = repository_rule(
    implementation = _googleapis_impl,
    local = True,
    attrs = {
        "build_file": attr.label(
            default = "//tools/bazel:googleapis.BUILD",
            allow_single_file = True,
        ),
    },
)
