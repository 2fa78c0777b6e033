/* gradsync.h is C99, and its structs can be used without a daemon. */

#include <gradsync/gradsync.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define EXPECT(condition)                                     \
  do {                                                        \
    if (!(condition)) {                                       \
      fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
      failures++;                                             \
    }                                                         \
  } while (0)

static int failures = 0;

static void ExpectError(gradsync_error_t* error, gradsync_code_t code, const char* reason,
                        const char* word) {
  EXPECT(gradsync_error_code(error) == code);
  EXPECT(strcmp(gradsync_error_reason(error), reason) == 0);
  EXPECT(strstr(gradsync_error_message(error), word) != NULL);
  gradsync_error_destroy(error);
}

/* What lies behind a program's shorter struct is not the library's; a longer one is cleared. */
static void TestStructsOfOtherReleases(void) {
  union {
    gradsync_session_options_t options;
    gradsync_step_result_t result;
    unsigned char bytes[1024];
  } u;
  const size_t sizes[] = {offsetof(gradsync_session_options_t, rank), sizeof(u.options) + 64,
                          offsetof(gradsync_step_result_t, used), sizeof(u.result) + 64};
  size_t i, at;
  for (i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i) {
    memset(&u, 0x5a, sizeof(u));
    u.options.struct_size = sizes[i];
    if (i < 2) {
      u.options.storage = NULL;
      gradsync_session_options_destroy(&u.options);
    } else {
      u.result.storage = NULL;
      gradsync_step_result_destroy(&u.result);
    }
    EXPECT(u.options.struct_size == sizes[i]);
    for (at = sizeof(size_t); at < sizes[i]; ++at) EXPECT(u.bytes[at] == 0);
    for (at = sizes[i]; at < sizeof(u); ++at) EXPECT(u.bytes[at] == 0x5a);
  }
}

static void TestClipping(void) {
  const gradsync_gradient_stats_t stats[2] = {{9, 0}, {16, 0}};
  gradsync_step_result_t result;
  double norm;
  gradsync_step_result_init(&result);
  norm = gradsync_gradient_norm(&result);
  EXPECT(norm != norm);
  norm = gradsync_gradient_norm(NULL);
  EXPECT(norm != norm);
  result.stats = stats;
  result.stats_count = 2;
  EXPECT(gradsync_gradient_norm(&result) == 5);
  /* A program of an older release has no such members. */
  result.struct_size = offsetof(gradsync_step_result_t, stats);
  norm = gradsync_gradient_norm(&result);
  EXPECT(norm != norm);
  EXPECT(gradsync_clip_coefficient(0.5, 1) == 1);
  EXPECT(gradsync_clip_coefficient(4, 1) == 1 / (4 + 1e-6));
  norm = gradsync_clip_coefficient(norm, 1);
  EXPECT(norm != norm);
}

int main(void) {
  gradsync_session_options_t options;
  gradsync_layout_spec_t spec;
  gradsync_step_result_t result;
  gradsync_statistics_t statistics;
  gradsync_session_t* session = NULL;

  EXPECT(gradsync_abi_version() == GRADSYNC_ABI_VERSION);
  EXPECT(gradsync_item_size(GRADSYNC_BFLOAT16) == 2);
  EXPECT(gradsync_item_size(GRADSYNC_UINT8) == 1 && gradsync_item_size(GRADSYNC_INT16) == 2);
  EXPECT(gradsync_item_size(GRADSYNC_INT32) == 4 && gradsync_item_size(GRADSYNC_INT64) == 8);
  EXPECT(gradsync_item_size(0) == 0 && gradsync_item_size(-1) == 0 && gradsync_item_size(99) == 0);
  EXPECT(strcmp(gradsync_code_name(GRADSYNC_ABORTED), "ABORTED") == 0);
  EXPECT(strcmp(gradsync_code_name((gradsync_code_t)99), "") == 0);

  /* No error is an error object too, for those who only print. */
  EXPECT(gradsync_error_code(NULL) == GRADSYNC_OK);
  EXPECT(strcmp(gradsync_error_message(NULL), "") == 0);
  EXPECT(strcmp(gradsync_error_reason(NULL), "") == 0);
  EXPECT(strcmp(gradsync_error_field(NULL, "rank"), "") == 0);
  gradsync_error_destroy(NULL);
  gradsync_session_destroy(NULL);
  gradsync_layout_destroy(NULL);
  gradsync_mapping_destroy(NULL);

  gradsync_session_options_init(&options);
  gradsync_layout_spec_init(&spec);
  gradsync_step_result_init(&result);
  gradsync_statistics_init(&statistics);
  EXPECT(options.struct_size == sizeof(options));
  EXPECT(spec.struct_size == sizeof(spec));
  EXPECT(result.struct_size == sizeof(result));
  EXPECT(statistics.struct_size == sizeof(statistics));
  gradsync_step_result_destroy(&result);
  gradsync_session_options_destroy(&options);

  ExpectError(gradsync_session_join(NULL, &session), GRADSYNC_INVALID_ARGUMENT, "MALFORMED",
              "options");
  options.struct_size = 0;
  ExpectError(gradsync_session_join(&options, &session), GRADSYNC_INVALID_ARGUMENT, "MALFORMED",
              "struct_size");
  options.struct_size = sizeof(size_t); /* no storage */
  ExpectError(gradsync_session_join(&options, &session), GRADSYNC_INVALID_ARGUMENT, "MALFORMED",
              "struct_size");
  gradsync_session_options_init(&options);
  options.job_id = "j";
  options.world_size = 1;
  ExpectError(gradsync_session_join(&options, NULL), GRADSYNC_INVALID_ARGUMENT, "MALFORMED",
              "session");
  options.rank = 1;
  ExpectError(gradsync_session_join(&options, &session), GRADSYNC_INVALID_ARGUMENT, "MALFORMED",
              "rank");
  options.rank = 0;
  options.on_rank_loss = 77;
  ExpectError(gradsync_session_join(&options, &session), GRADSYNC_INVALID_ARGUMENT, "MALFORMED",
              "on_rank_loss");
  options.on_rank_loss = 0;
  options.socket = "/nonexistent/gradsyncd.sock";
  options.connect_timeout = -1;
  ExpectError(gradsync_session_join(&options, &session), GRADSYNC_UNAVAILABLE, "DAEMON_LOST",
              "/nonexistent/gradsyncd.sock");

  /* A program of an older release, whose struct ended before the timeouts. */
  options.struct_size = offsetof(gradsync_session_options_t, on_rank_loss);
  options.on_rank_loss = 77;
  options.rank = 9;
  ExpectError(gradsync_session_join(&options, &session), GRADSYNC_INVALID_ARGUMENT, "MALFORMED",
              "rank");
  EXPECT(session == NULL);
  TestStructsOfOtherReleases();
  TestClipping();
  return failures == 0 ? 0 : 1;
}
