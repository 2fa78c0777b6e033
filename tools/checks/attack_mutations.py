"""Takes one defence against attackers away after the other, and checks that an attack is noticed.

    .venv/bin/python tools/checks/attack_mutations.py [WORD...]
    .venv/bin/python tools/checks/attack_mutations.py --check [WORD...]

Needs root, because the attackers are other users. Runs in copies of the committed tree, one per
core. First runs the attacks on the tree as it is: their tests must pass. With words, only the
mutations whose names or files contain one of them. Prints a table: each mutation, and the first
test that failed. Exit status: 0 every mutation made a test fail, 1 some mutation did not, or its
line is not in the tree, or there more than once, 2 wrong usage.

--check only looks for each mutation's line in the working tree, without a build. It prints the
mutations that would not run.
"""

import sys

from mutations import Mutation, main

MUTATIONS = (
    # Engines and other nodes.
    Mutation(
        "an engine takes any message on a lane",
        "daemon/engine/lane_connection.cc",
        "if (in_.header.number != ++in_.number || in_.header.bytes != transfer.bytes) {",
        "if (++in_.number == 0) {",
        "//tests/attack:engine_garbage_test *OnALane",
    ),
    Mutation(
        "an engine takes any token",
        "daemon/engine/peer_hello.cc",
        " ||\n      CRYPTO_memcmp(bytes.data(), token.data(), kPeerTokenBytes) != 0) {",
        ") {",
        "//tests/engine:peer_hello_test",
    ),
    Mutation(
        "a coordinator gives orders before its Welcome",
        "daemon/peer/coordinator_link.cc",
        "if (!message.has_welcome() && !Welcomed()) {",
        "if (message.kind_case() == 0 && !Welcomed()) {",
        "//tests/attack:peer_port_test PeerPort.ACoordinatorGivesNoOrdersBeforeItsWelcome",
    ),
    Mutation(
        "an address has any number of streams",
        "daemon/peer/peer_server.cc",
        "if (open.greeted_at_address >= kMaxGreeted) {",
        "if (open.greeted_at_address > kMaxNodes) {",
        "//tests/attack:peer_port_test PeerPort.StreamsOfOneAddressWithHelloAreFew",
    ),
    # Shared memory.
    Mutation(
        "pages need no seal",
        "daemon/arena/sealed_memory.cc",
        "return seals >= 0 && (seals & kWanted) == kWanted;",
        "return seals >= 0 && kWanted != 0;",
        "//tests/attack:port_attacks_test Holes.*",
    ),
    # Memory before a session is open.
    Mutation(
        "gRPC may hold any number of bytes for a user",
        "daemon/rpc/user_servers.cc",
        ".Resize(kQuotaBytes + sessions * kQuotaBytesPerSession)",
        ".Resize((std::size_t{64} << 30) + sessions * kQuotaBytesPerSession * kQuotaBytes)",
        "//tests/fault:memory_test MemoryTest.MessagesThatAreFarTooLongAreNotHeld",
    ),
    Mutation(
        "a user has any number of streams without a session",
        "daemon/rpc/gradsync_service.cc",
        "if (count <= most) return;",
        "if (count <= most + 100'000) return;",
        "//tests/fault:memory_test MemoryTest.StreamsWithoutASessionAreFew",
    ),
    # What the daemon keeps.
    Mutation(
        "layouts cost nothing",
        "daemon/job/layout_set.cc",
        "Reserve(LayoutChannel::BytesFor(request->spec, *plan, members_->world_size()));",
        "Reserve(LayoutChannel::BytesFor(request->spec, *plan, members_->world_size()) % 2);",
        "//tests/fault:memory_test ChargedLayouts.*",
    ),
    Mutation(
        "unread messages cost nothing",
        "daemon/rpc/session_stream.cc",
        "const std::size_t charged = bytes + kQueueStepBytes;",
        "const std::size_t charged = 1 + 0 * (bytes + kQueueStepBytes);",
        "//tests/fault:memory_test MemoryTest.UnreadMessagesAreCharged",
    ),
    Mutation(
        "ended jobs are kept whole",
        "daemon/job/job_table.cc",
        "  job->Retire();\n",
        "",
        "//tests/fault:memory_test MemoryTest.EndedJobsAreKeptAsSummaries",
    ),
    # Fairness.
    Mutation(
        "the reduce threads do not count a user's bytes",
        "daemon/reduce/user_shares.cc",
        "  user->served += bytes;\n",
        "  user->served += 0 * bytes;\n",
        "//tests/reduce:host_reducer_test",
    ),
    Mutation(
        "a message's buckets are all reduced by its reader",
        "daemon/reduce/host_reducer.cc",
        "if (traffic > kInlineTrafficBytes) break;",
        "if (traffic > 100'000 * kInlineTrafficBytes) break;",
        "//tests/reduce:host_reducer_test",
    ),
    Mutation(
        "users have no turns of their own",
        "daemon/base/fair_executor.cc",
        "void FairExecutor::Run(const Tenant& user, std::function<void()> work) {\n",
        "void FairExecutor::Run(const Tenant&, std::function<void()> work) {\n"
        "  const Tenant user(0);\n",
        "//tests/base:fair_executor_test",
    ),
    # Asking.
    Mutation(
        "a user does not rest after an answer",
        "daemon/base/fair_executor.cc",
        "    if (rest_ == 0) {",
        "    if (rest_ >= 0) {",
        "//tests/base:fair_executor_test",
    ),
    Mutation(
        "no descriptors are kept for asking",
        "daemon/rpc/descriptor_reserve.cc",
        "while (held_.size() < count_) {",
        "while (held_.size() < count_ && held_.size() > count_) {",
        "//tests/attack:asking_test *connections",
    ),
    # Who is who.
    Mutation(
        "another token is the same job",
        "daemon/job/job_key.h",
        "return std::tie(uid, job_id, token_hash) < std::tie(other.uid, other.job_id, "
        "other.token_hash);",
        "return std::tie(uid, job_id) < std::tie(other.uid, other.job_id);",
        "//tests/attack:port_attacks_test *other_tokens",
    ),
    # HTTP/2.
    Mutation(
        "a client resets any number of calls",
        "daemon/base/header_frames.h",
        "if (type == kReset) return ++resets_ <= kMostResets;",
        "if (type == kReset) return ++resets_ > 0;",
        "//tests/attack:harmful_connections_test *reset_*",
    ),
    Mutation(
        "headers need no end",
        "daemon/base/header_frames.h",
        "const bool many = unfinished_ > kMostBytes;",
        "const bool many = unfinished_ > kMostBytes << 16;",
        "//tests/base:header_frames_test",
    ),
    Mutation(
        "any number of bytes may be no data",
        "daemon/base/header_frames.h",
        "if (besides_ > most_besides()) return false;",
        "if (besides_ > most_besides() + (1u << 31)) return false;",
        "//tests/attack:harmful_connections_test *nothings:*_data",
    ),
)


if __name__ == "__main__":
    sys.exit(main(__doc__, MUTATIONS, timeout_s=300))
