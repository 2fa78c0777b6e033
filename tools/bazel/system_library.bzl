"""A library of the system as a repository: headers in /usr/include, the rest is linker flags."""

def _system_library_impl(ctx):
    build_file = ctx.attr.build_file
    if ctx.path(ctx.attr.header).exists:
        if ctx.attr.include:
            ctx.symlink(ctx.attr.include, "include")
    elif ctx.attr.build_file_if_absent:
        build_file = ctx.attr.build_file_if_absent
    else:
        fail("%s is not installed: %s is missing. Run tools/setup --test." % (ctx.name, ctx.attr.header))
    ctx.symlink(build_file, "BUILD.bazel")

system_library = repository_rule(
    implementation = _system_library_impl,
    local = True,
    attrs = {
        "build_file": attr.label(mandatory = True, allow_single_file = True),
        "build_file_if_absent": attr.label(allow_single_file = True),
        "header": attr.string(mandatory = True, doc = "Its absence means: not installed."),
        "include": attr.string(doc = "Folder of headers that the compiler does not search itself."),
    },
)
