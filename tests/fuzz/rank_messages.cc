#include "tests/fuzz/rank_messages.h"

namespace gradsync::fuzz {

v1::SessionRequest LayoutMessage(const std::string& name, std::uint32_t buckets,
                                 std::uint32_t replaces) {
  v1::SessionRequest request;
  v1::RegisterLayout& layout = *request.mutable_register_layout();
  layout.set_name(name);
  layout.set_request_id(1);
  layout.set_bucket_cap_bytes(16);
  layout.set_first_bucket_cap_bytes(16);
  layout.set_timeout_ms(1000);
  layout.set_op(v1::REDUCE_OP_AVERAGE);
  layout.set_replaces(replaces);
  for (std::uint32_t i = 0; i < buckets; ++i) {
    v1::Parameter& parameter = *layout.add_parameters();
    parameter.set_name(std::string(1, static_cast<char>('a' + i)));
    parameter.add_shape(4);
    parameter.set_dtype(v1::DATA_TYPE_FLOAT32);
  }
  return request;
}

v1::SessionRequest MappedMessage(std::uint32_t channel) {
  v1::SessionRequest request;
  request.mutable_arena_mapped()->set_channel(channel);
  return request;
}

v1::SessionRequest NextMessage(ByteReader* reader, std::uint32_t newest, RankCounts* counts) {
  v1::SessionRequest request;
  const auto channel = [&] { return static_cast<std::uint32_t>(reader->Number(newest)); };
  switch (reader->Below(24)) {
    case 0:
    case 1:
    case 2: {
      auto& ready = *request.mutable_bucket_ready();
      ready.set_channel(channel());
      ready.set_step(reader->Number(counts->step));
      for (std::uint32_t i = reader->Below(4); i > 0; --i) {
        ready.add_buckets(static_cast<std::uint32_t>(reader->Number(i - 1)));
      }
      if (reader->Below(4) == 0) ready.mutable_position()->set_batch(reader->Number(counts->step));
      break;
    }
    case 3:
    case 4:
    case 5: {
      auto& end = *request.mutable_end_step();
      end.set_channel(channel());
      end.set_step(reader->Number(counts->step));
      end.set_ready_rest(!reader->Bool());
      if (reader->Below(4) == 0) end.set_used_map(reader->Bytes(reader->Below(3)));
      break;
    }
    case 6:
      request.mutable_abandon_step()->set_channel(channel());
      request.mutable_abandon_step()->set_step(reader->Number(counts->step));
      request.mutable_abandon_step()->set_reason("why");
      break;
    case 7: {
      // One after the other: the order of arguments is the compiler's.
      const std::string name = reader->Bool() ? "a" : "b";
      const std::uint32_t buckets = 1 + reader->Below(3);
      request = LayoutMessage(name, buckets, reader->Bool() ? channel() : 0);
      if (reader->Below(4) == 0) {
        request.mutable_register_layout()->set_buffer_bytes(reader->Below(100));
      }
      if (reader->Below(4) == 0) {
        const v1::Parameter first = request.register_layout().parameters(0);
        *request.mutable_layout_part()->add_parameters() = first;
      }
      break;
    }
    case 8:
    case 9:
      request = MappedMessage(channel());
      break;
    case 10:
      request.mutable_release_layout()->set_channel(channel());
      break;
    case 11:
      request.mutable_barrier()->set_sequence(reader->Number(counts->sequence));
      request.mutable_barrier()->set_timeout_ms(reader->Number(1000));
      break;
    case 12: {
      auto& broadcast = *request.mutable_broadcast();
      broadcast.set_sequence(reader->Number(counts->sequence));
      broadcast.set_root(static_cast<std::uint32_t>(reader->Number(1)));
      broadcast.set_bytes(reader->Number(6000));
      broadcast.set_timeout_ms(1000);
      break;
    }
    case 13: {
      auto& reduce = *request.mutable_all_reduce();
      reduce.set_sequence(reader->Number(counts->sequence));
      reduce.set_count(reader->Number(16));
      reduce.set_dtype(static_cast<v1::DataType>(1 + reader->Below(3)));
      reduce.set_op(static_cast<v1::ReduceOp>(1 + reader->Below(3)));
      reduce.set_timeout_ms(1000);
      break;
    }
    case 14:
      request.mutable_chunk_written()->set_sequence(reader->Number(counts->sequence));
      request.mutable_chunk_written()->set_chunk(reader->Number(0));
      request.mutable_chunk_written()->set_bytes(reader->Number(2048));
      break;
    case 15:
      request.mutable_chunk_read()->set_sequence(reader->Number(counts->sequence));
      request.mutable_chunk_read()->set_chunk(reader->Number(0));
      break;
    case 16:
      ++counts->sequence;
      request.mutable_query_step()->set_channel(channel());
      request.mutable_query_step()->set_step(reader->Number(counts->step));
      break;
    case 17:
      request.mutable_fetch_state()->set_timeout_ms(reader->Number(1000));
      break;
    case 18:
      request.mutable_state_offer()->set_transfer(reader->Number(1));
      request.mutable_state_offer()->set_bytes(reader->Number(6000));
      break;
    case 19:
      request.mutable_state_written()->set_transfer(reader->Number(1));
      request.mutable_state_written()->set_chunk(reader->Number(0));
      break;
    case 20:
      request.mutable_state_read()->set_transfer(reader->Number(1));
      request.mutable_state_read()->set_chunk(reader->Number(0));
      break;
    case 21: {
      auto& digests = *request.mutable_state_digests();
      digests.set_transfer(reader->Number(1));
      digests.set_more(reader->Below(4) == 0);
      for (std::uint32_t i = reader->Below(3); i > 0; --i) {
        auto& item = *digests.add_items();
        item.set_name(std::string(1, static_cast<char>('a' + i)));
        item.set_sha256(std::string(32, static_cast<char>(reader->Below(2))));
      }
      break;
    }
    case 22:
      if (reader->Bool()) {
        request.mutable_leave()->set_exit(reader->Bool());
      } else {
        request.mutable_finish();
      }
      break;
    default:
      request.ParseFromString(reader->Bytes(reader->Byte()));
  }
  return request;
}

}  // namespace gradsync::fuzz
