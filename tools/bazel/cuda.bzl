"""The CUDA toolkit and NCCL's headers where tools/find_cuda finds them, and kernels compiled by nvcc.

No library of either is linked: the driver and NCCL are opened at run time (daemon/cuda).
"""

def _cuda_repository_impl(ctx):
    # Read so that a new pin fetches this repository again.
    ctx.read(Label("//tools:requirements-cuda.txt"))
    ctx.read(Label("//tools:requirements-nccl.txt"))
    result = ctx.execute([ctx.path(Label("//tools:find_cuda"))])
    if result.return_code:
        fail("tools/find_cuda: " + result.stderr)
    if result.stderr:
        # buildifier: disable=print
        print(result.stderr)
    found = dict([line.split("=", 1) for line in result.stdout.splitlines()])
    if "toolkit" not in found or "nccl" not in found:
        ctx.file("nvcc.sh", "#!/bin/sh\nexit 1\n")
        ctx.symlink(ctx.attr.build_file_if_absent, "BUILD.bazel")
        return
    ctx.symlink(found["toolkit"] + "/include", "toolkit")
    ctx.symlink(found["nccl"], "nccl")

    # The version is there to be part of each compilation's key.
    ctx.file("nvcc.sh", "#!/bin/sh\n# %s\nexec %s/bin/nvcc \"$@\"\n" % (found["nvcc"], found["toolkit"]))
    ctx.symlink(ctx.attr.build_file, "BUILD.bazel")

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    local = True,
    environ = [
        "CUDA_HOME",
        "NCCL_HOME",
        "PATH",
    ],
    attrs = {
        "build_file": attr.label(default = "//tools/bazel:cuda.BUILD", allow_single_file = True),
        "build_file_if_absent": attr.label(
            default = "//tools/bazel:cuda_absent.BUILD",
            allow_single_file = True,
        ),
    },
)

# One binary for each generation that is in use, and PTX, of which the driver makes one for any other.
_ARCHITECTURES = ["sm_80", "sm_90", "sm_100", "compute_80"]

# Names the symbol after the target, aligns it as the driver's loader wants it.
_EMBED = """{{
  printf '.section .rodata\\n.balign 16\\n.global {symbol}\\n.type {symbol}, @object\\n{symbol}:\\n'
  od -An -v -tx1 {fatbin} | sed 's/ /,0x/g; s/^,/.byte /'
  printf '.size {symbol}, . - {symbol}\\n.section .note.GNU-stack,"",@progbits\\n'
}} > {assembly}"""

def _cuda_fatbin_impl(ctx):
    fatbin = ctx.actions.declare_file(ctx.label.name + ".fatbin")
    arguments = ctx.actions.args()
    arguments.add_all(["--fatbin", "-std=c++17", "-O3", "--Werror", "all-warnings", "-I."])
    for name in _ARCHITECTURES:
        arguments.add("-gencode=arch=%s,code=%s" % (name.replace("sm_", "compute_"), name))
    arguments.add_all(["-o", fatbin, ctx.file.src])
    ctx.actions.run(
        executable = ctx.file._nvcc,
        arguments = [arguments],
        inputs = [ctx.file.src] + ctx.files.hdrs,
        outputs = [fatbin],
        use_default_shell_env = True,
        mnemonic = "Nvcc",
        progress_message = "Compiling kernels of %s" % ctx.label,
    )
    assembly = ctx.actions.declare_file(ctx.label.name + ".s")
    ctx.actions.run_shell(
        command = _EMBED.format(
            symbol = ctx.label.name,
            fatbin = fatbin.path,
            assembly = assembly.path,
        ),
        inputs = [fatbin],
        outputs = [assembly],
        mnemonic = "EmbedFatbin",
    )
    return DefaultInfo(files = depset([assembly]))

# One .cu file, compiled to a fat binary, as an assembly file for the srcs of a cc_library: it defines
# `extern "C" const unsigned char NAME[]`, which cuModuleLoadData takes.
cuda_fatbin = rule(
    implementation = _cuda_fatbin_impl,
    attrs = {
        "src": attr.label(mandatory = True, allow_single_file = [".cu"]),
        "hdrs": attr.label_list(allow_files = [".h"]),
        "_nvcc": attr.label(default = "@cuda//:nvcc.sh", allow_single_file = True),
        # Where there is no toolkit, this makes the target and all that depends on it incompatible.
        "_toolkit": attr.label(default = "@cuda//:headers"),
    },
)
