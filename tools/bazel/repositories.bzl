"""The repositories of a build without network: Debian's packages and the project's .venv."""

load("//tools/bazel:cuda.bzl", "cuda_repository")
load("//tools/bazel:googleapis.bzl", "googleapis_repository")
load("//tools/bazel:system_library.bzl", "system_library")

_LIBRARIES = {
    "abseil": "absl/status/statusor.h",
    "gloo": "gloo/context.h",
    "google_benchmark": "benchmark/benchmark.h",
    "googletest": "gmock/gmock.h",
    "grpc": "grpcpp/grpcpp.h",
    "highway": "hwy/highway.h",
    "nlohmann_json": "nlohmann/json.hpp",
    "openssl": "openssl/evp.h",
    "protobuf": "google/protobuf/message.h",
    "spdlog": "spdlog/spdlog.h",
    "systemd": "systemd/sd-daemon.h",
    "zlib": "zlib.h",
}

def gradsync_repositories():
    """Declares every external repository. Labels of libraries are in tools/bazel/*.BUILD."""
    native.local_repository(name = "bazel_skylib", path = "/usr/share/bazel/tools/skylib")
    native.local_repository(name = "rules_java", path = "/usr/share/bazel/rules/java")
    native.local_repository(name = "rules_proto", path = "/usr/share/bazel/rules/proto")
    native.local_repository(name = "rules_cc", path = "tools/bazel/rules_cc")
    native.local_repository(
        name = "remote_coverage_tools",
        path = "tools/bazel/remote_coverage_tools",
    )
    for name, header in _LIBRARIES.items():
        system_library(
            name = name,
            build_file = "//tools/bazel:%s.BUILD" % name,
            header = "/usr/include/" + header,
        )
    system_library(
        name = "openmpi",
        build_file = "//tools/bazel:openmpi.BUILD",
        header = "/usr/include/x86_64-linux-gnu/mpi/mpi.h",
        include = "/usr/include/x86_64-linux-gnu/mpi",
        build_file_if_absent = "//tools/bazel:openmpi_absent.BUILD",
    )
    googleapis_repository(name = "googleapis")
    cuda_repository(name = "cuda")
