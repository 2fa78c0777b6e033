#include "daemon/engine/lane_connection.h"

#include <poll.h>

#include "absl/status/statusor.h"

namespace gradsync::daemon {

absl::Status LaneConnection::Move(std::vector<TransferGroup*>* done) {
  absl::Status status = Write(done);
  if (status.ok()) status = Read(done);
  return status;
}

int LaneConnection::events() const {
  return (in_.transfers.empty() ? 0 : POLLIN) | (out_.transfers.empty() ? 0 : POLLOUT);
}

void LaneConnection::Done(Direction* direction, std::vector<TransferGroup*>* done) {
  done->push_back(direction->transfers.front().group);
  direction->transfers.Pop();
  direction->header_done = direction->data_done = 0;
}

absl::Status LaneConnection::Read(std::vector<TransferGroup*>* done) {
  while (!in_.transfers.empty()) {
    const Transfer& transfer = in_.transfers.front();
    const bool in_header = in_.header_done < sizeof(Header);
    std::byte* const to = in_header ? reinterpret_cast<std::byte*>(&in_.header) + in_.header_done
                                    : transfer.data + in_.data_done;
    const std::size_t left =
        in_header ? sizeof(Header) - in_.header_done : transfer.bytes - in_.data_done;
    const absl::StatusOr<std::size_t> got = stream_.Read(to, left);
    if (!got.ok()) return got.status();
    if (*got == 0) return absl::OkStatus();
    if (in_header) {
      in_.header_done += *got;
      if (in_.header_done < sizeof(Header)) continue;
      if (in_.header.number != ++in_.number || in_.header.bytes != transfer.bytes) {
        return absl::InternalError("it has sent another message than the one that is expected");
      }
      continue;
    }
    in_.data_done += *got;
    if (in_.data_done == transfer.bytes) Done(&in_, done);
  }
  return absl::OkStatus();
}

absl::Status LaneConnection::Write(std::vector<TransferGroup*>* done) {
  while (!out_.transfers.empty()) {
    const Transfer& transfer = out_.transfers.front();
    const bool in_header = out_.header_done < sizeof(Header);
    out_.header = {out_.number + 1, transfer.bytes};
    const std::byte* const from =
        in_header ? reinterpret_cast<const std::byte*>(&out_.header) + out_.header_done
                  : transfer.data + out_.data_done;
    const std::size_t left =
        in_header ? sizeof(Header) - out_.header_done : transfer.bytes - out_.data_done;
    const absl::StatusOr<std::size_t> sent = stream_.Write(from, left, /*more=*/in_header);
    if (!sent.ok()) return sent.status();
    if (*sent == 0) return absl::OkStatus();
    (in_header ? out_.header_done : out_.data_done) += *sent;
    if (out_.data_done == transfer.bytes) {
      ++out_.number;
      Done(&out_, done);
    }
  }
  return absl::OkStatus();
}

}  // namespace gradsync::daemon
