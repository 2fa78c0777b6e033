"""C++ from .proto files with the system's protoc and gRPC plugin."""

# protoc's import path after the library's own root: those that the sandbox of this action has.
_IMPORTS = "$$(ls -d proto external/googleapis /usr/include 2>/dev/null | sed s/^/-I/)"

def _import_root_impl(ctx):
    roots = [path.rstrip("/") for path in [ctx.attr.path, ctx.bin_dir.path + "/" + ctx.attr.path]]
    context = cc_common.create_compilation_context(system_includes = depset(roots))
    return [CcInfo(compilation_context = context)]

# Where includes of generated headers start, also from packages below it (`includes` of a cc_library
# cannot point upward). System includes: our warnings do not apply to them.
proto_import_root = rule(
    implementation = _import_root_impl,
    attrs = {"path": attr.string(mandatory = True)},
)

def _import_root():
    """The folder that `import` statements start from, and the target that has it as include path."""
    package = native.package_name()
    if package == "proto" or package.startswith("proto/"):
        return "proto", "@gradsync//tools/bazel:proto_import_root"
    if native.repository_name() == "@googleapis":
        return "external/googleapis", "@gradsync//tools/bazel:googleapis_import_root"
    return "", None

def _cc_label(dep, suffix):
    if ":" not in dep:
        fail("gradsync_proto_library: write the dependency '%s' with its colon" % dep)
    return dep + suffix

def _stem(src):
    if not src.endswith(".proto"):
        fail("gradsync_proto_library: '%s' is not a .proto file" % src)
    return src[:-len(".proto")]

def gradsync_proto_library(
        name,
        srcs,
        deps = [],
        grpc = False,
        testonly = None,
        visibility = None):
    """Generates C++ and a descriptor set from .proto files.

    Makes NAME (the .proto files with all that they import), NAME_cc_proto (messages),
    NAME_descriptor (NAME.protoset, a FileDescriptorSet with imports) and, with grpc, NAME_cc_grpc
    (services). NAME_cc_grpc sees gRPC's headers but links no gRPC: the binary chooses by depending
    on @grpc//:grpc++ or @grpc//:grpc++_unsecure.

    Args:
      name: of the library.
      srcs: .proto files of this package; those below proto/ import each other from there.
      deps: other libraries of this macro, written with a colon (":config", "@googleapis//:rpc").
      grpc: whether services are generated.
      testonly: as in every rule.
      visibility: as in every rule.
    """
    root, include = _import_root()
    includes = [include] if include else []
    stems = [_stem(src) for src in srcs]
    imports = "-I%s %s" % (root or ".", _IMPORTS)
    out = ("$(BINDIR)/" + root).rstrip("/")
    common = {"testonly": testonly, "visibility": visibility}

    native.filegroup(name = name, srcs = srcs + deps, **common)

    sources = " ".join(["$(location %s)" % src for src in srcs])
    native.genrule(
        name = name + "_cc_proto_gen",
        srcs = srcs + deps,
        outs = [stem + suffix for stem in stems for suffix in [".pb.h", ".pb.cc"]],
        cmd = "protoc %s --cpp_out=%s %s" % (imports, out, sources),
        message = "Generating messages of",
        testonly = testonly,
        visibility = ["//visibility:private"],
    )
    native.cc_library(
        name = name + "_cc_proto",
        srcs = [stem + ".pb.cc" for stem in stems],
        hdrs = [stem + ".pb.h" for stem in stems],
        copts = ["-w"],
        deps = includes + ["@protobuf"] + [_cc_label(dep, "_cc_proto") for dep in deps],
        **common
    )
    native.genrule(
        name = name + "_descriptor",
        srcs = srcs + deps,
        outs = [name + ".protoset"],
        cmd = "protoc %s --include_imports --descriptor_set_out=$@ %s" % (imports, sources),
        message = "Generating descriptors of",
        **common
    )
    if grpc:
        native.genrule(
            name = name + "_cc_grpc_gen",
            srcs = srcs + deps,
            outs = [stem + suffix for stem in stems for suffix in [".grpc.pb.h", ".grpc.pb.cc"]],
            cmd = "protoc %s --grpc_out=%s --plugin=protoc-gen-grpc=$$(command -v grpc_cpp_plugin) %s" %
                  (imports, out, sources),
            message = "Generating services of",
            testonly = testonly,
            visibility = ["//visibility:private"],
        )
        native.cc_library(
            name = name + "_cc_grpc",
            srcs = [stem + ".grpc.pb.cc" for stem in stems],
            hdrs = [stem + ".grpc.pb.h" for stem in stems],
            copts = ["-w"],
            deps = [":" + name + "_cc_proto", "@grpc//:headers"],
            **common
        )
