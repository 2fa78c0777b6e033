/* Two trainers in C. One is killed, and a survivor gives its replacement the state. */

#define _XOPEN_SOURCE 700

#include <gradsync/gradsync.h>
#include <signal.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/client/c_processes.h"

#define WORLD_SIZE 2
#define ELEMENTS 1000
#define STEPS 5
#define DEATH 3 /* rank 1 is killed in this step */
#define BUFFER_BYTES 24

static void CheckReason(int line, gradsync_error_t* error, const char* reason) {
  if (strcmp(gradsync_error_reason(error), reason) != 0) {
    Fail(line, gradsync_error_message(error));
  }
  gradsync_error_destroy(error);
}

/* ---- The state ------------------------------------------------------------------------------- */

static float weight[ELEMENTS];
static char buffers[BUFFER_BYTES];
static gradsync_state_item_t items[2];

static int Read(void* user, const gradsync_state_item_t** out, size_t* count, char* reason) {
  CHECK(user == (void*)weight);
  (void)reason; /* the state is always there */
  items[0].name = "weight";
  items[0].data = weight;
  items[0].bytes = sizeof(weight);
  items[1].name = "buffers";
  items[1].data = buffers;
  items[1].bytes = sizeof(buffers);
  *out = items;
  *count = 2;
  return 0;
}

static void Done(void* user) { CHECK(user == (void*)weight); }

static void Serve(gradsync_session_t* session) {
  gradsync_state_reader_t reader;
  gradsync_state_reader_init(&reader);
  CheckReason(__LINE__, gradsync_serve_state(session, &reader), "MALFORMED");
  reader.user = weight;
  reader.read = Read;
  reader.done = Done;
  CHECK_OK(gradsync_serve_state(session, &reader));
}

static void Load(const gradsync_state_image_t* image) {
  gradsync_state_item_t item;
  CHECK(gradsync_state_image_source(image) == 0);
  CHECK(gradsync_state_image_count(image) == 2);
  CHECK_OK(gradsync_state_image_item(image, 0, &item));
  CHECK(strcmp(item.name, "weight") == 0 && item.bytes == sizeof(weight));
  memcpy(weight, item.data, item.bytes);
  CHECK_OK(gradsync_state_image_item(image, 1, &item));
  CHECK(strcmp(item.name, "buffers") == 0 && item.bytes == sizeof(buffers));
  memcpy(buffers, item.data, item.bytes);
  CheckReason(__LINE__, gradsync_state_image_item(image, 2, &item), "MALFORMED");
}

/* ---- Training -------------------------------------------------------------------------------- */

static gradsync_layout_t* RegisterFirst(gradsync_session_t* session) {
  gradsync_layout_t* layout = NULL;
  gradsync_layout_spec_t spec;
  gradsync_parameter_t parameter;
  const uint64_t shape[1] = {ELEMENTS};
  parameter.name = "weight";
  parameter.shape = shape;
  parameter.dimensions = 1;
  parameter.data_type = GRADSYNC_FLOAT32;
  gradsync_layout_spec_init(&spec);
  spec.name = "model";
  spec.parameters = &parameter;
  spec.parameter_count = 1;
  spec.buffer_bytes = BUFFER_BYTES;
  CHECK_OK(gradsync_register_layout(session, &spec, &layout));
  return layout;
}

static gradsync_layout_t* RegisterCurrent(gradsync_session_t* session) {
  gradsync_layout_t* layout = NULL;
  gradsync_current_layouts_t* layouts = NULL;
  gradsync_layout_spec_t spec;
  uint64_t step = 0;
  CHECK_OK(gradsync_get_current_layouts(session, &layouts));
  CHECK(gradsync_current_layouts_count(layouts) == 1);
  gradsync_layout_spec_init(&spec);
  CHECK_OK(gradsync_current_layouts_get(layouts, 0, &spec, &step));
  CheckReason(__LINE__, gradsync_current_layouts_get(layouts, 1, &spec, &step), "MALFORMED");
  CHECK(strcmp(spec.name, "model") == 0 && spec.parameter_count == 1);
  CHECK(spec.parameters[0].dimensions == 1 && spec.parameters[0].shape[0] == ELEMENTS);
  CHECK(spec.buffer_bytes == BUFFER_BYTES);
  CHECK_OK(gradsync_register_layout(session, &spec, &layout));
  gradsync_current_layouts_destroy(layouts);
  CHECK(step == gradsync_next_step(layout));
  return layout;
}

static void RunStep(gradsync_layout_t* layout, int dies) {
  const uint64_t step = gradsync_next_step(layout);
  gradsync_view_t gradient, buffer;
  int i;
  gradsync_set_position(layout, 0, step);
  CHECK_OK(gradsync_layout_gradient(layout, 0, &gradient));
  CHECK_OK(gradsync_layout_buffers(layout, &buffer));
  CHECK(buffer.count == BUFFER_BYTES && buffer.data_type == GRADSYNC_UINT8);
  for (i = 0; i < ELEMENTS; ++i) ((float*)gradient.data)[i] = (float)(2 * rank + (int)step + i);
  memset(buffer.data, rank == 0 ? 'a' + (int)step : 0, BUFFER_BYTES);
  CHECK_OK(gradsync_mark_ready(layout, step, gradient.bucket));
  if (dies) kill(getpid(), SIGKILL);
  CHECK_OK(gradsync_finish_step(layout, step, NULL));
  CHECK_OK(gradsync_wait_step(layout, step, GRADSYNC_FOREVER, NULL));
  for (i = 0; i < ELEMENTS; ++i) weight[i] -= ((float*)gradient.data)[i];
  memcpy(buffers, buffer.data, BUFFER_BYTES);
}

static int RunRank(const char* socket) {
  gradsync_session_t* session = NULL;
  gradsync_layout_t* layout = NULL;
  gradsync_state_image_t* image = NULL;
  gradsync_session_options_t options;
  gradsync_state_item_t item;
  int replaces, i;
  gradsync_session_options_init(&options);
  options.socket = socket;
  options.job_id = "c_heal";
  options.rank = (uint32_t)rank;
  options.world_size = WORLD_SIZE;
  options.on_rank_loss = GRADSYNC_HOLD;
  CHECK_OK(gradsync_session_join(&options, &session));
  replaces = gradsync_session_is_replacement(session);
  layout = replaces ? RegisterCurrent(session) : RegisterFirst(session);
  if (replaces) {
    CheckReason(__LINE__, gradsync_mark_ready(layout, gradsync_next_step(layout), 0),
                "PROTOCOL_VIOLATION");
    CheckReason(__LINE__, gradsync_confirm_state(session, GRADSYNC_FOREVER), "PROTOCOL_VIOLATION");
    Serve(session);
    CHECK_OK(gradsync_fetch_state(session, GRADSYNC_FOREVER, &image));
    Load(image);
    gradsync_state_image_destroy(image);
    CHECK_OK(gradsync_confirm_state(session, GRADSYNC_FOREVER));
    CHECK(gradsync_next_step(layout) == DEATH);
  } else {
    Serve(session);
    CheckReason(__LINE__, gradsync_fetch_state(session, 0, &image), "PROTOCOL_VIOLATION");
  }
  while (gradsync_next_step(layout) <= STEPS) {
    RunStep(layout, rank == 1 && !replaces && gradsync_next_step(layout) == DEATH);
  }
  for (i = 0; i < ELEMENTS; ++i) {
    /* Averages are step + 1 + i. */
    CHECK(weight[i] == -(float)(STEPS * (STEPS + 1) / 2 + STEPS * (1 + i)));
  }
  CHECK(buffers[BUFFER_BYTES - 1] == 'a' + STEPS);
  CHECK_OK(gradsync_pause_state(session));
  CHECK_OK(gradsync_serve_state(session, NULL));
  item.name = "weight";
  item.data = weight;
  item.bytes = sizeof(weight);
  CHECK_OK(gradsync_check_in_sync(session, &item, 1, GRADSYNC_FOREVER));
  weight[0] += (float)rank;
  CheckReason(__LINE__, gradsync_check_in_sync(session, &item, 1, GRADSYNC_FOREVER),
              "RANKS_DIVERGED");
  CheckReason(__LINE__, gradsync_check_in_sync(session, NULL, 1, GRADSYNC_FOREVER), "MALFORMED");
  CHECK_OK(gradsync_session_leave(session));
  gradsync_layout_destroy(layout);
  gradsync_session_destroy(session);
  gradsync_state_image_destroy(NULL);
  gradsync_current_layouts_destroy(NULL);
  return 0;
}

/* ---- The processes --------------------------------------------------------------------------- */

static void RunAll(void) {
  int status = -1;
  pid_t victim;
  StartRank(0);
  victim = StartRank(1);
  CHECK(AwaitRank(&status) == victim);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  StartRank(1);
  AwaitSuccess();
  AwaitSuccess();
}

int main(int argc, char** argv) { return RunProcesses(argc, argv, RunRank, RunAll); }
