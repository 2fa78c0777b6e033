/* Two trainers in C. */

#include <gradsync/gradsync.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "tests/client/c_processes.h"

#define WORLD_SIZE 2
#define BUCKETS 4
#define ELEMENTS 1000
#define STEPS 3

static void CheckError(int line, gradsync_error_t* error, gradsync_code_t code, const char* reason,
                       const char* error_rank, const char* step, const char* bucket) {
  if (gradsync_error_code(error) != code || strcmp(gradsync_error_reason(error), reason) != 0) {
    fprintf(stderr, "%s, not %s\n", reason, gradsync_error_reason(error));
    Fail(line, gradsync_error_message(error));
  }
  if (strcmp(gradsync_error_field(error, "rank"), error_rank) != 0) Fail(line, "rank");
  if (strcmp(gradsync_error_field(error, "step"), step) != 0) Fail(line, "step");
  if (strcmp(gradsync_error_field(error, "bucket"), bucket) != 0) Fail(line, "bucket");
  if (strcmp(gradsync_error_field(error, "no such field"), "") != 0) Fail(line, "no such field");
  gradsync_error_destroy(error);
}

static gradsync_session_t* Join(const char* socket) {
  gradsync_session_t* session = NULL;
  gradsync_session_options_t options;
  gradsync_session_options_init(&options);
  options.socket = socket;
  options.job_id = "c_end_to_end";
  options.rank = (uint32_t)rank;
  options.world_size = WORLD_SIZE;
  CHECK_OK(gradsync_session_join(&options, &session));
  CHECK(gradsync_session_rank(session) == (uint32_t)rank);
  CHECK(gradsync_session_world_size(session) == WORLD_SIZE);
  CHECK(gradsync_session_generation(session) == 1);
  CHECK(gradsync_session_incarnation(session) != 0);
  return session;
}

/* In the place of `old` unless it is NULL. */
static gradsync_layout_t* Register(gradsync_session_t* session, gradsync_layout_t* old) {
  gradsync_layout_t* layout = NULL;
  gradsync_layout_spec_t spec;
  gradsync_parameter_t parameters[BUCKETS];
  const uint64_t shape[2] = {ELEMENTS / 10, 10};
  char names[BUCKETS][16];
  int i;
  for (i = 0; i < BUCKETS; ++i) {
    snprintf(names[i], sizeof(names[i]), "p%d", i);
    parameters[i].name = names[i];
    parameters[i].shape = shape;
    parameters[i].dimensions = 2;
    parameters[i].data_type = GRADSYNC_FLOAT32;
  }
  gradsync_layout_spec_init(&spec);
  spec.name = "model";
  spec.parameters = parameters;
  spec.parameter_count = BUCKETS;
  /* One parameter in each bucket. */
  spec.bucket_cap_bytes = ELEMENTS * sizeof(float);
  spec.first_bucket_cap_bytes = ELEMENTS * sizeof(float);
  if (old == NULL) {
    CHECK_OK(gradsync_register_layout(session, &spec, &layout));
  } else {
    CHECK_OK(gradsync_replace_layout(session, old, &spec, &layout));
  }
  CHECK(strcmp(gradsync_layout_name(layout), "model") == 0);
  CHECK(gradsync_layout_bucket_count(layout) == BUCKETS);
  CHECK(gradsync_layout_parameter_count(layout) == BUCKETS);
  CHECK(gradsync_layout_fingerprint(layout) != 0);
  return layout;
}

static float* Gradient(gradsync_layout_t* layout, size_t parameter, uint32_t* bucket) {
  gradsync_view_t view;
  CHECK_OK(gradsync_layout_gradient(layout, parameter, &view));
  CHECK(view.count == ELEMENTS && view.data_type == GRADSYNC_FLOAT32);
  if (bucket != NULL) *bucket = view.bucket;
  return view.data;
}

static void RunStep(gradsync_layout_t* layout) {
  const uint64_t step = gradsync_next_step(layout);
  gradsync_step_result_t result;
  double sum_of_squares = 0, norm;
  int parameter, i;
  for (parameter = BUCKETS - 1; parameter >= 0; --parameter) {
    uint32_t bucket;
    float* gradient = Gradient(layout, (size_t)parameter, &bucket);
    for (i = 0; i < ELEMENTS; ++i) gradient[i] = (float)(10 * (int)step + parameter + 2 * rank);
    CHECK_OK(gradsync_mark_ready(layout, step, bucket));
  }
  CheckError(__LINE__, gradsync_mark_ready(layout, step, 2), GRADSYNC_FAILED_PRECONDITION,
             "ALREADY_READY", rank == 0 ? "0" : "1",
             step == 1   ? "1"
             : step == 2 ? "2"
             : step == 3 ? "3"
                         : "7",
             "2");
  CHECK_OK(gradsync_wait_bucket(layout, step, 0, GRADSYNC_FOREVER));
  CHECK_OK(gradsync_end_step(layout, step, NULL));
  gradsync_step_result_init(&result);
  /* First as a program of an older release, whose struct ended before `used`. */
  result.struct_size = offsetof(gradsync_step_result_t, used);
  result.bucket_count = 77;
  CHECK_OK(gradsync_wait_step(layout, step, GRADSYNC_FOREVER, &result));
  CHECK(result.step == step && result.live_ranks == WORLD_SIZE && result.bucket_count == 77);
  gradsync_step_result_destroy(&result);
  CHECK(result.step == 0 && result.bucket_count == 77);
  gradsync_step_result_init(&result);
  CHECK_OK(gradsync_wait_step(layout, step, GRADSYNC_FOREVER, &result));
  CHECK(result.step == step && result.live_ranks == WORLD_SIZE && result.divisor == WORLD_SIZE);
  CHECK(result.used == NULL && result.used_count == 0 && result.bucket_count == BUCKETS);
  for (i = 0; i < BUCKETS; ++i) {
    CHECK(result.buckets[i].rank_count == WORLD_SIZE);
    CHECK(result.buckets[i].ready_ns[rank] > 0);
    CHECK(result.buckets[i].start_ns <= result.buckets[i].finish_ns);
  }
  CHECK(result.stats_count == BUCKETS);
  for (parameter = 0; parameter < BUCKETS; ++parameter) {
    const double value = 10 * (double)step + parameter + 1;
    uint32_t bucket;
    Gradient(layout, (size_t)parameter, &bucket);
    CHECK(result.stats[bucket].sum_of_squares == ELEMENTS * value * value);
    CHECK(result.stats[bucket].non_finite == 0);
    sum_of_squares += ELEMENTS * value * value;
  }
  norm = gradsync_gradient_norm(&result);
  CHECK(norm * norm > 0.999999 * sum_of_squares && norm * norm < 1.000001 * sum_of_squares);
  CHECK(gradsync_clip_coefficient(norm, norm / 2) < 0.5);
  gradsync_step_result_destroy(&result);
  for (parameter = 0; parameter < BUCKETS; ++parameter) {
    const float* gradient = Gradient(layout, (size_t)parameter, NULL);
    for (i = 0; i < ELEMENTS; ++i) CHECK(gradient[i] == (float)(10 * (int)step + parameter + 1));
  }
}

/* Bit by bit: which parameters were used, and a step that nobody finishes. */
static void RunOddSteps(gradsync_layout_t* layout) {
  const uint8_t used[2][BUCKETS] = {{1, 0, 0, 0}, {0, 0, 1, 0}};
  gradsync_step_result_t result;
  size_t i;
  for (i = 0; i < BUCKETS; ++i) CHECK_OK(gradsync_mark_ready(layout, STEPS + 1, i));
  CHECK_OK(gradsync_end_step(layout, STEPS + 1, used[rank]));
  gradsync_step_result_init(&result);
  CHECK_OK(gradsync_wait_step(layout, STEPS + 1, GRADSYNC_FOREVER, &result));
  CHECK(result.used_count == BUCKETS);
  CHECK(result.used[0] == 1 && result.used[1] == 0 && result.used[2] == 1 && result.used[3] == 0);
  gradsync_step_result_destroy(&result);

  if (rank == 1) {
    CheckError(__LINE__, gradsync_wait_step(layout, STEPS + 2, 1000000, NULL),
               GRADSYNC_DEADLINE_EXCEEDED, "WAIT_TIMEOUT", "1", "5", "");
    CHECK_OK(gradsync_abandon_step(layout, STEPS + 2, "the loss is not a number"));
  }
  CheckError(__LINE__, gradsync_wait_step(layout, STEPS + 2, GRADSYNC_FOREVER, NULL),
             GRADSYNC_ABORTED, "STEP_ABANDONED", "1", "5", "0");
}

/* Nobody uses parameter 1, rank 0 alone parameter 2. */
static void RunUnused(gradsync_layout_t* layout) {
  const uint64_t step = gradsync_next_step(layout);
  gradsync_step_result_t result;
  size_t i;
  for (i = 0; i < BUCKETS; ++i) Gradient(layout, i, NULL)[7] = 4.0f + (float)rank;
  CHECK_OK(gradsync_mark_unused(layout, step, 1));
  if (rank == 1) CHECK_OK(gradsync_mark_unused(layout, step, 2));
  CheckError(__LINE__, gradsync_mark_unused(layout, step, BUCKETS), GRADSYNC_INVALID_ARGUMENT,
             "UNKNOWN_PARAMETER", rank == 0 ? "0" : "1", "6", "");
  for (i = 0; i < 2; ++i) CHECK_OK(gradsync_mark_ready(layout, step, i));
  CHECK_OK(gradsync_finish_step(layout, step, NULL));
  gradsync_step_result_init(&result);
  CHECK_OK(gradsync_wait_step(layout, step, GRADSYNC_FOREVER, &result));
  CHECK(result.used_count == BUCKETS && result.used[1] == 0 && result.used[2] == 1);
  gradsync_step_result_destroy(&result);
  CHECK(Gradient(layout, 0, NULL)[7] == 4.5f);
  CHECK(Gradient(layout, 1, NULL)[7] == 4.0f + (float)rank);
  CHECK(Gradient(layout, 2, NULL)[7] == 2.0f);
}

/* Which parameters were used, in the message that marks every bucket; and the last bucket's cap. */
static void RunLastBucket(gradsync_session_t* session) {
  const uint8_t used[3] = {1, 1, 0};
  gradsync_parameter_t parameters[3];
  gradsync_layout_spec_t spec;
  gradsync_layout_t* layout = NULL;
  gradsync_step_result_t result;
  gradsync_view_t view;
  const uint64_t shape[1] = {ELEMENTS};
  size_t i;
  for (i = 0; i < 3; ++i) {
    parameters[i].name = i == 0 ? "first" : i == 1 ? "second" : "third";
    parameters[i].shape = shape;
    parameters[i].dimensions = 1;
    parameters[i].data_type = GRADSYNC_FLOAT32;
  }
  gradsync_layout_spec_init(&spec);
  spec.name = "tail";
  spec.parameters = parameters;
  spec.parameter_count = 3;
  spec.last_bucket_cap_bytes = ELEMENTS * sizeof(float);
  /* As a program of an older release, whose struct ended before it. */
  spec.struct_size = offsetof(gradsync_layout_spec_t, last_bucket_cap_bytes);
  CHECK_OK(gradsync_register_layout(session, &spec, &layout));
  CHECK(gradsync_layout_bucket_count(layout) == 1);
  spec.struct_size = sizeof(spec);
  {
    gradsync_layout_t* whole = layout;
    CHECK_OK(gradsync_replace_layout(session, whole, &spec, &layout));
    gradsync_layout_destroy(whole);
  }
  CHECK(gradsync_layout_bucket_count(layout) == 2);
  for (i = 0; i < 3; ++i) {
    CHECK_OK(gradsync_layout_gradient(layout, i, &view));
    CHECK(view.bucket == (i == 0 ? 1 : 0));
    ((float*)view.data)[0] = (float)i + 2 * (float)rank;
  }
  CHECK_OK(gradsync_finish_step(layout, 1, used));
  gradsync_step_result_init(&result);
  CHECK_OK(gradsync_wait_step(layout, 1, GRADSYNC_FOREVER, &result));
  CHECK(result.used_count == 3 && result.used[1] == 1 && result.used[2] == 0);
  gradsync_step_result_destroy(&result);
  for (i = 0; i < 3; ++i) {
    CHECK_OK(gradsync_layout_gradient(layout, i, &view));
    CHECK(((float*)view.data)[0] == (float)i + 1);
  }
  gradsync_layout_destroy(layout);
}

static void RunOperations(gradsync_session_t* session) {
  double values[2];
  int32_t integers[2];
  char text[16] = "nothing yet";
  CHECK_OK(gradsync_barrier(session, GRADSYNC_FOREVER));
  if (rank == 1) strcpy(text, "from rank 1");
  CHECK_OK(gradsync_broadcast(session, text, sizeof(text), 1, GRADSYNC_FOREVER));
  CHECK(strcmp(text, "from rank 1") == 0);
  values[0] = rank;
  values[1] = 4.0;
  CHECK_OK(
      gradsync_all_reduce(session, values, 2, GRADSYNC_FLOAT64, GRADSYNC_SUM, GRADSYNC_FOREVER));
  CHECK(values[0] == 1.0 && values[1] == 8.0);
  CHECK_OK(gradsync_all_reduce(session, values, 2, GRADSYNC_FLOAT64, 0, GRADSYNC_FOREVER));
  CHECK(values[0] == 1.0 && values[1] == 8.0);
  integers[0] = rank;
  integers[1] = INT32_MAX;
  CHECK_OK(
      gradsync_all_reduce(session, integers, 2, GRADSYNC_INT32, GRADSYNC_SUM, GRADSYNC_FOREVER));
  CHECK(integers[0] == 1 && integers[1] == -2);
  integers[0] = 5 - rank;
  CHECK_OK(
      gradsync_all_reduce(session, integers, 2, GRADSYNC_INT32, GRADSYNC_MIN, GRADSYNC_FOREVER));
  CHECK(integers[0] == 4 && integers[1] == -2);
  CheckError(__LINE__,
             gradsync_all_reduce(session, integers, 2, GRADSYNC_INT32, 0, GRADSYNC_FOREVER),
             GRADSYNC_INVALID_ARGUMENT, "MALFORMED", rank == 0 ? "0" : "1", "", "");
  CheckError(__LINE__, gradsync_broadcast(session, text, 1, WORLD_SIZE, GRADSYNC_FOREVER),
             GRADSYNC_INVALID_ARGUMENT, "MALFORMED", rank == 0 ? "0" : "1", "", "");
}

static int RunRank(const char* socket) {
  gradsync_session_t* session = Join(socket);
  gradsync_layout_t* layout = Register(session, NULL);
  gradsync_layout_t* replaced = layout;
  gradsync_mapping_t* mapping = NULL;
  gradsync_statistics_t statistics;
  gradsync_view_t view;
  uint32_t last_to_leave = WORLD_SIZE;
  int i;
  CheckError(__LINE__, gradsync_layout_bucket(layout, BUCKETS, &view), GRADSYNC_INVALID_ARGUMENT,
             "UNKNOWN_BUCKET", "", "", "");
  CheckError(__LINE__, gradsync_mark_ready(layout, 1, BUCKETS), GRADSYNC_INVALID_ARGUMENT,
             "UNKNOWN_BUCKET", rank == 0 ? "0" : "1", "1", "4");
  for (i = 0; i < STEPS; ++i) RunStep(layout);
  RunOperations(session);
  RunOddSteps(layout);
  RunUnused(layout);
  layout = Register(session, replaced);
  CheckError(__LINE__, gradsync_mark_ready(replaced, STEPS + 4, 0), GRADSYNC_FAILED_PRECONDITION,
             "LAYOUT_REPLACED", rank == 0 ? "0" : "1", "7", "");
  CHECK(Gradient(replaced, 0, NULL)[7] == 4.5f);
  gradsync_layout_destroy(replaced);
  CHECK(gradsync_next_step(layout) == STEPS + 4);
  RunStep(layout);

  gradsync_statistics_init(&statistics);
  statistics.struct_size = offsetof(gradsync_statistics_t, steps_void);
  statistics.steps_void = 77;
  gradsync_session_statistics(session, &statistics);
  CHECK(statistics.steps_complete == STEPS + 3 && statistics.steps_void == 77);
  gradsync_statistics_init(&statistics);
  gradsync_session_statistics(session, &statistics);
  CHECK(statistics.steps_complete == STEPS + 3 && statistics.steps_void == 1);
  CHECK(statistics.buckets_marked == (STEPS + 3) * BUCKETS);
  CHECK(statistics.bytes_reduced >= (STEPS + 3) * BUCKETS * ELEMENTS * sizeof(float));

  for (i = 0; i < 3; ++i) {
    uint32_t found = (uint32_t)rank;
    CHECK_OK(gradsync_session_leave_and_stay(session, GRADSYNC_FOREVER, &last_to_leave));
    CHECK(last_to_leave < WORLD_SIZE);
    CHECK_OK(gradsync_broadcast(session, &found, sizeof(found), GRADSYNC_LOWEST_LIVE_RANK,
                                GRADSYNC_FOREVER));
    CHECK(found == 0);
  }
  RunLastBucket(session);
  CHECK_OK(gradsync_barrier(session, GRADSYNC_FOREVER));
  CHECK_OK(gradsync_session_leave(session));
  CheckError(__LINE__, gradsync_barrier(session, 0), GRADSYNC_FAILED_PRECONDITION, "LEFT",
             rank == 0 ? "0" : "1", "", "");
  gradsync_session_destroy(session);

  /* The memory stays for those who hold it. */
  CHECK_OK(gradsync_layout_bucket(layout, 0, &view));
  CHECK_OK(gradsync_layout_mapping(layout, &mapping));
  gradsync_layout_destroy(layout);
  ((float*)view.data)[0] = 1.5f;
  CHECK(((float*)view.data)[0] == 1.5f);
  gradsync_mapping_destroy(mapping);
  return 0;
}

static void RunAll(void) {
  int i;
  for (i = 0; i < WORLD_SIZE; ++i) StartRank(i);
  for (i = 0; i < WORLD_SIZE; ++i) AwaitSuccess();
}

int main(int argc, char** argv) { return RunProcesses(argc, argv, RunRank, RunAll); }
