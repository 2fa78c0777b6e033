/* gradsync's C API, in plain C99: what gradsync/client.h offers to C++.
 *
 * gradsync/client.h says what each call does and which errors it returns. This header says what is
 * different in C.
 *
 * Errors. A function that can fail returns a gradsync_error_t*. NULL means success; anything else
 * belongs to the caller, who passes it to gradsync_error_destroy(). Out parameters are written on
 * success only. Nothing here aborts, prints, throws or installs signal handlers.
 *
 * Once a session has ended, every call of it and of its layouts returns why. GRADSYNC_UNAVAILABLE
 * with reason "DAEMON_SILENT" does not end the session: gradsyncd is stopped or hangs. Then
 * gradsync_wait_step(), gradsync_wait_bucket(), gradsync_session_leave_and_stay(),
 * gradsync_fetch_state() and gradsync_confirm_state() can be repeated.
 *
 * Ownership. An object from a `**` parameter belongs to the caller, who passes it to its _destroy()
 * function; each _destroy() accepts NULL. Every other pointer that a function returns belongs to
 * the object that it was called with, and is valid as long as that object. Arguments are copied
 * before a function returns. A layout may outlive its session. Views of its memory are valid while
 * the layout or a gradsync_mapping_t of it exists.
 *
 * Threads. Every function may be called from any thread at any time, but do not destroy an object
 * while another thread uses it. After fork(2), calls in the child fail with
 * GRADSYNC_FAILED_PRECONDITION, and _destroy() functions do nothing.
 *
 * Strings are UTF-8 and end with NUL. Durations are in nanoseconds; GRADSYNC_FOREVER never ends.
 * With a timeout of 0 or below, gradsync_wait_step(), gradsync_wait_bucket(),
 * gradsync_session_leave_and_stay() and gradsync_confirm_state() return at once: the answer if
 * there is one, else GRADSYNC_DEADLINE_EXCEEDED. In an options struct, 0 means the default that its
 * comment gives.
 *
 * Compatibility. A program works with any newer library of the same ABI version.
 * GRADSYNC_ABI_VERSION is the version that the program was compiled for; gradsync_abi_version()
 * returns that of the loaded library. Structs that begin with `struct_size` may grow at their end
 * in later releases. The struct's _init() function sets `struct_size` to the size that the program
 * was compiled with, and every other byte to 0, which means the defaults; a program may do so
 * itself. The library reads and writes at most `struct_size` bytes, and takes members beyond them
 * as 0. `struct_size` covers at least itself and, where it exists, `storage`. All other structs and
 * the numbers of enumerations are fixed for one GRADSYNC_ABI_VERSION; functions are only added.
 */

#ifndef GRADSYNC_GRADSYNC_H_
#define GRADSYNC_GRADSYNC_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define GRADSYNC_EXPORT __attribute__((visibility("default")))
#define GRADSYNC_MUST_USE __attribute__((warn_unused_result))
#else
#define GRADSYNC_EXPORT
#define GRADSYNC_MUST_USE
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define GRADSYNC_ABI_VERSION 1
GRADSYNC_EXPORT uint32_t gradsync_abi_version(void);

#define GRADSYNC_FOREVER INT64_MAX

typedef struct gradsync_error gradsync_error_t;
typedef struct gradsync_session gradsync_session_t;
typedef struct gradsync_layout gradsync_layout_t;
typedef struct gradsync_mapping gradsync_mapping_t;

/* ---- Errors ---------------------------------------------------------------------------------- */

/* The numbers are gRPC's. */
typedef enum gradsync_code {
  GRADSYNC_OK = 0,
  GRADSYNC_CANCELLED = 1,
  GRADSYNC_UNKNOWN = 2,
  GRADSYNC_INVALID_ARGUMENT = 3,
  GRADSYNC_DEADLINE_EXCEEDED = 4,
  GRADSYNC_NOT_FOUND = 5,
  GRADSYNC_ALREADY_EXISTS = 6,
  GRADSYNC_PERMISSION_DENIED = 7,
  GRADSYNC_RESOURCE_EXHAUSTED = 8,
  GRADSYNC_FAILED_PRECONDITION = 9,
  GRADSYNC_ABORTED = 10,
  GRADSYNC_OUT_OF_RANGE = 11,
  GRADSYNC_UNIMPLEMENTED = 12,
  GRADSYNC_INTERNAL = 13,
  GRADSYNC_UNAVAILABLE = 14,
  GRADSYNC_DATA_LOSS = 15,
  GRADSYNC_UNAUTHENTICATED = 16
} gradsync_code_t;

/* These accept NULL, and return GRADSYNC_OK and empty strings for it. */
GRADSYNC_EXPORT gradsync_code_t gradsync_error_code(const gradsync_error_t* error);
GRADSYNC_EXPORT const char* gradsync_error_message(const gradsync_error_t* error);
/* Why the call failed, for programs: a reason such as "RANK_LOST", or "". docs/errors.md lists
 * them. */
GRADSYNC_EXPORT const char* gradsync_error_reason(const gradsync_error_t* error);
/* What the error is about: the value of field "job", "rank", "channel", "step" or "bucket"; "" if
 * the error has no such field. */
GRADSYNC_EXPORT const char* gradsync_error_field(const gradsync_error_t* error, const char* field);
GRADSYNC_EXPORT void gradsync_error_destroy(gradsync_error_t* error);
/* The code's name: "ABORTED". "" for a number that is no code. */
GRADSYNC_EXPORT const char* gradsync_code_name(gradsync_code_t code);

/* ---- Joining a job --------------------------------------------------------------------------- */

typedef enum gradsync_data_type {
  GRADSYNC_FLOAT32 = 1,
  GRADSYNC_FLOAT64 = 2,
  GRADSYNC_FLOAT16 = 3,
  GRADSYNC_BFLOAT16 = 4,
  /* Integers have a sum, a minimum and a maximum, but no average. */
  GRADSYNC_INT8 = 5,
  GRADSYNC_UINT8 = 6,
  GRADSYNC_INT16 = 7,
  GRADSYNC_INT32 = 8,
  GRADSYNC_INT64 = 9
} gradsync_data_type_t;

/* In every option below, 0 means the default. Integers, minimum and maximum are allowed only with
 * explicit buckets in host memory, and with gradsync_all_reduce(). */
typedef enum gradsync_reduce_op {
  GRADSYNC_SUM = 1,     /* each node's ranks in order, then the nodes; integers wrap around */
  GRADSYNC_AVERAGE = 2, /* default */
  GRADSYNC_MIN = 3,     /* NaN if an element is NaN; -0 is less than +0 */
  GRADSYNC_MAX = 4      /* the same */
} gradsync_reduce_op_t;

typedef enum gradsync_divisor {
  GRADSYNC_LIVE_RANKS = 1, /* default */
  GRADSYNC_WORLD = 2
} gradsync_divisor_t;

typedef enum gradsync_loss_policy {
  GRADSYNC_ABORT = 1,   /* default: a lost rank ends the job */
  GRADSYNC_HOLD = 2,    /* the running step waits until another process takes the rank's place */
  GRADSYNC_CONTINUE = 3 /* not implemented yet */
} gradsync_loss_policy_t;

/* Who gives a replacement the state of the model. */
typedef enum gradsync_state_source {
  GRADSYNC_STATE_OF_SURVIVOR = 1, /* default: a survivor, see gradsync_serve_state() */
  GRADSYNC_STATE_OF_TRAINER = 2   /* the trainers themselves, for example from a file per step */
} gradsync_state_source_t;

typedef enum gradsync_nccl_algorithm {
  GRADSYNC_NCCL_ALGORITHM_AUTO = 0, /* default: NCCL's choice */
  GRADSYNC_NCCL_TREE = 1,
  GRADSYNC_NCCL_RING = 2,
  GRADSYNC_NCCL_COLLNET_DIRECT = 3,
  GRADSYNC_NCCL_COLLNET_CHAIN = 4,
  GRADSYNC_NCCL_NVLS = 5,
  GRADSYNC_NCCL_NVLS_TREE = 6
} gradsync_nccl_algorithm_t;

typedef enum gradsync_nccl_protocol {
  GRADSYNC_NCCL_PROTOCOL_AUTO = 0, /* default: NCCL's choice */
  GRADSYNC_NCCL_LL = 1,
  GRADSYNC_NCCL_LL128 = 2,
  GRADSYNC_NCCL_SIMPLE = 3
} gradsync_nccl_protocol_t;

typedef enum gradsync_nccl_wire_type {
  GRADSYNC_NCCL_WIRE_AUTO = 0,     /* default: 16-bit types travel as float32 */
  GRADSYNC_NCCL_WIRE_SAME = 1,     /* every type travels as itself */
  GRADSYNC_NCCL_WIRE_BFLOAT16 = 2, /* float32 travels as bfloat16 */
  GRADSYNC_NCCL_WIRE_FLOAT16 = 3   /* float32 travels as float16; Inf if it is too large */
} gradsync_nccl_wire_type_t;

/* Bytes of one element; 0 for a number that is no data type. */
GRADSYNC_EXPORT size_t gradsync_item_size(int32_t data_type);

typedef struct gradsync_session_options {
  size_t struct_size;
  void* storage;           /* the library's: NULL, or the strings of _from_environment() */
  const char* socket;      /* NULL: /run/gradsync/gradsyncd.sock */
  const char* job_id;      /* required; the same on every rank; 1 to 128 printable characters */
  const char* token;       /* NULL: none */
  uint32_t rank;           /* from 0 */
  uint32_t world_size;     /* required; at least 1 */
  int32_t on_rank_loss;    /* gradsync_loss_policy_t */
  int32_t divisor;         /* gradsync_divisor_t */
  int64_t step_timeout;    /* 0: the daemon's option step_timeout, 30 min unless it is set */
  int64_t connect_timeout; /* 0: 60 s; negative: do not wait */
  /* "host" or "host:port" of the daemon on rank 0's node, the same on every rank; NULL: every rank
   * is on this node. */
  const char* coordinator;
  /* How NCCL sums gradients between GPUs, the same on every rank. */
  uint32_t nccl_max_ctas; /* the most thread blocks of a kernel; 0: NCCL's choice */
  int32_t nccl_algorithm; /* gradsync_nccl_algorithm_t */
  int32_t nccl_protocol;  /* gradsync_nccl_protocol_t */
  int32_t nccl_wire_type; /* gradsync_nccl_wire_type_t */
  int32_t rank_given;     /* not 0: _from_environment() keeps `rank`, which may be 0 */
  int32_t state_source;   /* gradsync_state_source_t; only with GRADSYNC_HOLD */
  int64_t hold_timeout;   /* only with GRADSYNC_HOLD: how long others wait in one step; 0: 10 min */
} gradsync_session_options_t;

static inline void gradsync_session_options_init(gradsync_session_options_t* options) {
  memset(options, 0, sizeof(*options));
  options->struct_size = sizeof(*options);
}
/* Fills `options` from the environment variables of torchrun and gradsync; see
 * SessionOptions::FromEnvironment in gradsync/client.h. A member that is already set wins over its
 * variable, which is then not needed. A string is set if it is not NULL, `world_size` if it is not
 * 0, and `rank` if `rank_given` is not 0. The strings are valid until
 * gradsync_session_options_destroy(), which sets `options` as its _init() does. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_session_options_from_environment(
    gradsync_session_options_t* options);
GRADSYNC_EXPORT void gradsync_session_options_destroy(gradsync_session_options_t* options);

GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_session_join(
    const gradsync_session_options_t* options, gradsync_session_t** session);
/* If neither gradsync_session_leave() nor gradsync_session_finish() was called before, this rank is
 * lost for the others. */
GRADSYNC_EXPORT void gradsync_session_destroy(gradsync_session_t* session);

GRADSYNC_EXPORT uint32_t gradsync_session_rank(const gradsync_session_t* session);
GRADSYNC_EXPORT uint32_t gradsync_session_world_size(const gradsync_session_t* session);
GRADSYNC_EXPORT uint64_t gradsync_session_generation(const gradsync_session_t* session);
GRADSYNC_EXPORT uint64_t gradsync_session_incarnation(const gradsync_session_t* session);
/* 1 if the session takes the place of a lost one (GRADSYNC_HOLD), otherwise 0. */
GRADSYNC_EXPORT int gradsync_session_is_replacement(const gradsync_session_t* session);

/* ---- Layouts --------------------------------------------------------------------------------- */

typedef struct gradsync_parameter {
  const char* name;      /* required; unique within the layout; 1 to 512 bytes */
  const uint64_t* shape; /* elements per dimension */
  size_t dimensions;     /* 0: a scalar */
  int32_t data_type;     /* gradsync_data_type_t */
} gradsync_parameter_t;

typedef struct gradsync_explicit_bucket {
  uint64_t count;    /* elements */
  int32_t data_type; /* gradsync_data_type_t */
} gradsync_explicit_bucket_t;

/* Either parameters, in the order of the forward pass, or explicit buckets. */
typedef struct gradsync_layout_spec {
  size_t struct_size;
  const char* name; /* NULL: "default" */
  const gradsync_parameter_t* parameters;
  size_t parameter_count;
  const gradsync_explicit_bucket_t* explicit_buckets;
  size_t explicit_bucket_count;
  uint64_t bucket_cap_bytes;       /* 0: 25 MiB */
  uint64_t first_bucket_cap_bytes; /* 0: 1 MiB */
  int32_t op;                      /* gradsync_reduce_op_t */
  int64_t timeout;                 /* 0: 5 min */
  /* Largest size of the last bucket; 0: no limit but bucket_cap_bytes. See LayoutSpec in
   * gradsync/client.h. */
  uint64_t last_bucket_cap_bytes;
  /* UUID of the GPU that holds the buckets, see gradsync_cuda_device_uuid(); NULL: host memory.
   * Either every rank names its own GPU, or none does. */
  const char* device;
  /* Bytes of one more bucket for the model's buffers, see gradsync_layout_buffers(); 0: none. Only
   * in host memory. */
  uint64_t buffer_bytes;
} gradsync_layout_spec_t;

static inline void gradsync_layout_spec_init(gradsync_layout_spec_t* spec) {
  memset(spec, 0, sizeof(*spec));
  spec->struct_size = sizeof(*spec);
}

/* Returns when every rank has registered the same layout. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_register_layout(
    gradsync_session_t* session, const gradsync_layout_spec_t* spec, gradsync_layout_t** layout);
/* `old` still belongs to the caller. If this fails, it is unchanged. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_replace_layout(
    gradsync_session_t* session, gradsync_layout_t* old, const gradsync_layout_spec_t* spec,
    gradsync_layout_t** layout);
/* "This rank does not use the layout any more." Its name is then free, and the daemon frees its
 * memory; views stay readable until gradsync_layout_destroy(). Release a layout on every rank or on
 * none: if a rank that released it is missing in a step, the step is void after 5 s. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_layout_release(
    gradsync_layout_t* layout);
/* Releases the layout, unless it is released already; abandons an open step first. */
GRADSYNC_EXPORT void gradsync_layout_destroy(gradsync_layout_t* layout);

GRADSYNC_EXPORT const char* gradsync_layout_name(const gradsync_layout_t* layout);
GRADSYNC_EXPORT uint64_t gradsync_layout_fingerprint(const gradsync_layout_t* layout);
GRADSYNC_EXPORT size_t gradsync_layout_bucket_count(const gradsync_layout_t* layout);
GRADSYNC_EXPORT size_t gradsync_layout_parameter_count(const gradsync_layout_t* layout);
/* UUID of the GPU that holds the layout; "": host memory. */
GRADSYNC_EXPORT const char* gradsync_layout_device(const gradsync_layout_t* layout);

typedef struct gradsync_view {
  void* data; /* a device address on a GPU; a bucket is aligned to 128 bytes, a gradient to 64 */
  uint64_t count;    /* elements */
  uint32_t bucket;   /* index of the bucket, or of the bucket that holds the gradient */
  int32_t data_type; /* gradsync_data_type_t */
} gradsync_view_t;

/* GRADSYNC_INVALID_ARGUMENT if there is no such bucket or parameter. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_layout_bucket(
    const gradsync_layout_t* layout, size_t bucket, gradsync_view_t* view);
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_layout_gradient(
    const gradsync_layout_t* layout, size_t parameter, gradsync_view_t* view);

/* The last bucket if the layout was registered with `buffer_bytes`; otherwise a view of 0 elements
 * at NULL. Rank 0 writes its buffers there, and every other rank writes zeros. A complete step
 * brings rank 0's bytes to every rank. Mark it like every other bucket. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_layout_buffers(
    const gradsync_layout_t* layout, gradsync_view_t* view);

/* Keeps the layout's memory mapped until gradsync_mapping_destroy(). */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_layout_mapping(
    const gradsync_layout_t* layout, gradsync_mapping_t** mapping);
GRADSYNC_EXPORT void gradsync_mapping_destroy(gradsync_mapping_t* mapping);

/* ---- Steps ----------------------------------------------------------------------------------- */

/* The first step of this rank when the layout became ready: 1, or more if it replaces another
 * layout or the session replaces a lost one. Another rank may have abandoned that step by now. */
GRADSYNC_EXPORT uint64_t gradsync_first_step(const gradsync_layout_t* layout);
/* The number of the step to run now, from 1. */
GRADSYNC_EXPORT uint64_t gradsync_next_step(const gradsync_layout_t* layout);

/* Says where this rank is in its data at the next step that it begins. If ranks give different
 * positions in one step, the daemon ends the session of the rank that gave its position last:
 * "POSITION_MISMATCH". */
GRADSYNC_EXPORT void gradsync_set_position(gradsync_layout_t* layout, uint64_t epoch,
                                           uint64_t batch);

/* "This rank did not use the parameter in this step." Call it before the parameter's bucket is
 * marked ready. The gradient becomes zeros. If no rank used the parameter, gradsync_wait_step()
 * puts back what the gradient held before. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_mark_unused(gradsync_layout_t* layout,
                                                                         uint64_t step,
                                                                         size_t parameter);
/* "Every gradient of this bucket is written." Buckets may be marked in any order, each once per
 * step. From here until the bucket is done, its memory belongs to the daemon. With GRADSYNC_HOLD it
 * is then read-only until the verdict, see gradsync_wait_bucket(). Never blocks. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_mark_ready(gradsync_layout_t* layout,
                                                                        uint64_t step,
                                                                        size_t bucket);
/* "This rank has marked every bucket ready." `used`: one byte per parameter, 0 if this rank did not
 * use it; NULL: it used all. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_end_step(gradsync_layout_t* layout,
                                                                      uint64_t step,
                                                                      const uint8_t* used);
/* Marks every bucket that was not marked, and ends the step, in one message. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_finish_step(gradsync_layout_t* layout,
                                                                         uint64_t step,
                                                                         const uint8_t* used);
/* "This rank cannot finish the step." The step is void on every rank, and the other ranks' errors
 * contain `reason`. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_abandon_step(gradsync_layout_t* layout,
                                                                          uint64_t step,
                                                                          const char* reason);
/* Waits until one bucket is reduced. The value is provisional: the step can still become void, see
 * gradsync_wait_step() below. With GRADSYNC_HOLD the bucket is read-only until that call has
 * returned the verdict: the replacement of another rank may get the average from this memory. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_wait_bucket(gradsync_layout_t* layout,
                                                                         uint64_t step,
                                                                         size_t bucket,
                                                                         int64_t timeout);

/* ---- Steps of a layout on a GPU -------------------------------------------------------------- */

/* These take the trainer's streams; see Layout in gradsync/client.h. A stream is a CUstream, which
 * is also a cudaStream_t; NULL is the legacy default stream. To use a destroyed stream is
 * undefined, as in CUDA. gradsync_mark_ready() and gradsync_finish_step(), above, are for host
 * memory only; the other functions above work on both.
 *
 * gradsync_layout_destroy() and gradsync_mapping_destroy() wait for every stream of the GPU. Call
 * neither while a stream is being captured into a graph. */

/* For gradsync_wait_on_stream(): all buckets of the layout. */
#define GRADSYNC_EVERY_BUCKET SIZE_MAX

/* "Every gradient of this bucket is written once these streams get here." Never waits for the GPU.
 */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_mark_ready_on_streams(
    gradsync_layout_t* layout, uint64_t step, size_t bucket, void* const* streams,
    size_t stream_count);
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_finish_step_on_streams(
    gradsync_layout_t* layout, uint64_t step, const uint8_t* used, void* const* streams,
    size_t stream_count);
/* Work that is enqueued on `stream` after this call runs when the bucket, or
 * GRADSYNC_EVERY_BUCKET, is done, whether the step is complete or void. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_wait_on_stream(
    gradsync_layout_t* layout, uint64_t step, size_t bucket, void* stream);
/* Device address of a float: 0 if the step is complete, 1 if it is void, as optimizers take
 * `found_inf`. Read it on a stream after gradsync_wait_on_stream(GRADSYNC_EVERY_BUCKET). NULL in
 * host memory. The value never contradicts gradsync_wait_step(): if any GPU may have read 0,
 * gradsync_wait_step() returns NULL or STEP_IN_DOUBT on every rank. */
GRADSYNC_EXPORT const float* gradsync_device_verdict(const gradsync_layout_t* layout,
                                                     uint64_t step);

/* "GPU-" or "MIG-", then 36 characters and NUL. */
#define GRADSYNC_DEVICE_UUID_SIZE 41
/* UUID of the GPU that CUDA calls `ordinal` in this process. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_cuda_device_uuid(
    int32_t ordinal, char uuid[GRADSYNC_DEVICE_UUID_SIZE]);

/* ---- Verdicts -------------------------------------------------------------------------------- */

/* When one bucket was marked and reduced, in nanoseconds of CLOCK_MONOTONIC. */
typedef struct gradsync_bucket_times {
  const uint64_t* ready_ns; /* one per rank */
  size_t rank_count;
  uint64_t start_ns; /* of the reduction */
  uint64_t finish_ns;
} gradsync_bucket_times_t;

typedef struct gradsync_gradient_stats {
  /* The sum over the result's elements; NaN or Inf if an element is. NaN for integers, minima and
   * maxima, which are not measured; 0 for the model's buffers. */
  double sum_of_squares;
  uint64_t non_finite; /* elements that are NaN or Inf */
} gradsync_gradient_stats_t;

typedef struct gradsync_step_result {
  size_t struct_size;
  void* storage; /* the library's */
  uint64_t step;
  uint32_t live_ranks; /* ranks that took part */
  uint32_t divisor;    /* averages are sums divided by this */
  const uint8_t*
      used; /* per parameter: 1 if at least one rank used it; NULL: every rank used all */
  size_t used_count;
  const gradsync_bucket_times_t* buckets; /* one per bucket */
  size_t bucket_count;
  const gradsync_gradient_stats_t* stats; /* one per bucket */
  size_t stats_count;
} gradsync_step_result_t;

static inline void gradsync_step_result_init(gradsync_step_result_t* result) {
  memset(result, 0, sizeof(*result));
  result->struct_size = sizeof(*result);
}
/* Waits for the step's verdict, which is the same on every rank. NULL: the step is complete, and
 * every bucket holds the reduction. `result` may be NULL. This overwrites `result`, and frees
 * nothing that it pointed to before. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_wait_step(
    gradsync_layout_t* layout, uint64_t step, int64_t timeout, gradsync_step_result_t* result);
/* Frees what a result points to, and sets it as its _init() does. The struct itself belongs to the
 * caller. */
GRADSYNC_EXPORT void gradsync_step_result_destroy(gradsync_step_result_t* result);

/* Gradient clipping without a pass over the gradients; see GradientNorm() in gradsync/client.h.
 * NaN if `result` is NULL or holds no statistics. */
GRADSYNC_EXPORT double gradsync_gradient_norm(const gradsync_step_result_t* result);
/* min(1, max_norm / (norm + 1e-6)); NaN for a norm of NaN, 0 for a norm of Inf. */
GRADSYNC_EXPORT double gradsync_clip_coefficient(double norm, double max_norm);

/* ---- The state of the model ------------------------------------------------------------------ */

/* With GRADSYNC_HOLD and GRADSYNC_STATE_OF_SURVIVOR, a survivor gives a replacement the state of
 * the model. Every rank calls gradsync_serve_state() once. A replacement registers the layouts of
 * gradsync_get_current_layouts(), fetches the state, loads it, and calls gradsync_confirm_state().
 *
 * The other ranks' state must not change from their first mark of a step (gradsync_mark_ready(),
 * gradsync_end_step() or gradsync_finish_step()) until gradsync_wait_step() has returned the
 * verdict, nor while gradsync_session_leave() or gradsync_session_finish() waits. In that time the
 * library may read it while this rank waits, or between its gradsync_end_step() and the next wait.
 * These calls return only when the reading has stopped, at most 100 ms after they have their
 * answer: gradsync_wait_step(), gradsync_wait_bucket(), gradsync_abandon_step(),
 * gradsync_confirm_state(), gradsync_broadcast(), gradsync_all_reduce(), gradsync_serve_state(),
 * gradsync_pause_state(), gradsync_session_leave(), gradsync_session_finish(),
 * gradsync_layout_destroy() and gradsync_session_destroy(). If read() itself is running, they also
 * wait for its return, 10 s at most. Session in gradsync/client.h lists the errors. */

/* One part of the state: a parameter, a state of the optimizer and so on. */
typedef struct gradsync_state_item {
  const char* name; /* 1 to 1024 bytes of UTF-8, unique within the state */
  void* data;       /* host memory */
  size_t bytes;
} gradsync_state_item_t;

/* Most bytes that read() may write to `reason`, with the NUL. */
#define GRADSYNC_STATE_REASON_SIZE 1024

/* Tells the library where the state is. The functions are called on a thread of the library. */
typedef struct gradsync_state_reader {
  size_t struct_size;
  /* Passed to the functions. Valid until gradsync_session_destroy(), or another
   * gradsync_serve_state(), has returned. */
  void* user;
  /* Sets `*items` and `*count`, with the same names in the same order on every rank, and returns 0.
   * The items and their memory stay as they are until done(). On failure it returns another number,
   * and writes why to `reason`, at most GRADSYNC_STATE_REASON_SIZE bytes. */
  int (*read)(void* user, const gradsync_state_item_t** items, size_t* count, char* reason);
  /* The items are not used any more. May be NULL. */
  void (*done)(void* user);
} gradsync_state_reader_t;

static inline void gradsync_state_reader_init(gradsync_state_reader_t* reader) {
  memset(reader, 0, sizeof(*reader));
  reader->struct_size = sizeof(*reader);
}
/* Copies `reader`. NULL: this rank serves its state no more. Returns when nothing uses the previous
 * reader any more. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_serve_state(
    gradsync_session_t* session, const gradsync_state_reader_t* reader);
/* Stops the reading that goes on during a wait of another thread. Returns when it has stopped. The
 * reading may go on at the next wait. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_pause_state(
    gradsync_session_t* session);
/* How often gradsync_pause_state() was called. Never blocks. */
GRADSYNC_EXPORT uint64_t gradsync_state_pauses(const gradsync_session_t* session);
/* For a helper thread that makes calls for the trainer. `pauses`: the value of
 * gradsync_state_pauses() when the trainer handed its calls to the helper. If
 * gradsync_pause_state() was called after that, the library does not read the state during these
 * calls: the trainer no longer waits for them. */
GRADSYNC_EXPORT void gradsync_call_began(gradsync_session_t* session, uint64_t pauses);

typedef struct gradsync_current_layouts gradsync_current_layouts_t;

/* In a replacement: the layouts that the job has now, which this rank has to register. Otherwise:
 * none. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_get_current_layouts(
    const gradsync_session_t* session, gradsync_current_layouts_t** layouts);
GRADSYNC_EXPORT size_t gradsync_current_layouts_count(const gradsync_current_layouts_t* layouts);
/* Fills `spec` for gradsync_register_layout(); set its struct_size before. `spec` then points to
 * memory of `layouts`. `step`: the running step, or the next one if none is running; may be NULL.
 * GRADSYNC_INVALID_ARGUMENT if there is no such layout. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_current_layouts_get(
    const gradsync_current_layouts_t* layouts, size_t index, gradsync_layout_spec_t* spec,
    uint64_t* step);
GRADSYNC_EXPORT void gradsync_current_layouts_destroy(gradsync_current_layouts_t* layouts);

typedef struct gradsync_state_image gradsync_state_image_t;

/* In a replacement: gets the state of the model from a survivor. `timeout` covers everything until
 * gradsync_confirm_state() returns. It may be GRADSYNC_FOREVER: if other ranks wait for this one
 * for longer than hold_timeout, the job ends anyway. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_fetch_state(
    gradsync_session_t* session, int64_t timeout, gradsync_state_image_t** image);
/* The rank that gave the state. */
GRADSYNC_EXPORT uint32_t gradsync_state_image_source(const gradsync_state_image_t* image);
GRADSYNC_EXPORT size_t gradsync_state_image_count(const gradsync_state_image_t* image);
/* Item `index`, in the order of the source; its memory is aligned to 64 bytes, may be written, and
 * belongs to the image. GRADSYNC_INVALID_ARGUMENT if there is no such item. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_state_image_item(
    const gradsync_state_image_t* image, size_t index, gradsync_state_item_t* item);
GRADSYNC_EXPORT void gradsync_state_image_destroy(gradsync_state_image_t* image);

/* In a replacement that has loaded the state: reads it through read(), and waits until it is
 * compared with the survivors' state. NULL: its steps may begin. GRADSYNC_ABORTED
 * "STATE_INTERRUPTED": call gradsync_fetch_state() again. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_confirm_state(
    gradsync_session_t* session, int64_t timeout);
/* Checks that every rank has the same items. This is an operation of the job, see below. Call it
 * between two steps, with any gradsync_loss_policy_t. If the items differ, it returns
 * GRADSYNC_FAILED_PRECONDITION "RANKS_DIVERGED" on every rank. GRADSYNC_CANCELLED:
 * gradsync_pause_state() was called. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_check_in_sync(
    gradsync_session_t* session, const gradsync_state_item_t* items, size_t count, int64_t timeout);

/* ---- The job's own operations ---------------------------------------------------------------- */

/* Says that this rank begins its next collective, in whatever way the ranks carry it out. Never
 * blocks. If ranks give different descriptions for the same place in the order, the job ends for
 * all: GRADSYNC_FAILED_PRECONDITION "OPERATION_MISMATCH". With GRADSYNC_HOLD every call ends the
 * job for all: GRADSYNC_UNIMPLEMENTED "LOSS_POLICY". `description`: 1 to 256 bytes. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_begin_collective(
    gradsync_session_t* session, const char* description);
/* Asks which ranks have begun fewer collectives than this one. It is for a rank that has waited for
 * `waited` ns in a collective that does not go through the daemon. Never blocks: if some rank is
 * late, gradsync_session_take_notice() soon says so. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_query_collectives(
    gradsync_session_t* session, int64_t waited);

/* Every rank calls the same operations in the same order. They block until done. */

GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_barrier(gradsync_session_t* session,
                                                                     int64_t timeout);
/* As the root of a broadcast: the lowest rank that has not left. */
#define GRADSYNC_LOWEST_LIVE_RANK UINT32_MAX
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_broadcast(gradsync_session_t* session,
                                                                       void* data, size_t bytes,
                                                                       uint32_t root,
                                                                       int64_t timeout);
/* Reduces `count` elements in place. `op`: a gradsync_reduce_op_t; 0 is the average. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_all_reduce(gradsync_session_t* session,
                                                                        void* data, size_t count,
                                                                        int32_t data_type,
                                                                        int32_t op,
                                                                        int64_t timeout);

/* Ends the session; the other ranks go on. With GRADSYNC_HOLD, this and gradsync_session_finish()
 * wait until every rank has left or finished, or the job has ended. They return at once if some
 * rank has never joined, the job has no layout now, or one of its layouts has had no complete step.
 * See Leave in gradsync/client.h. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_session_leave(
    gradsync_session_t* session);
/* Ends the session because this process ends without an error. If another rank then begins a step
 * or anything else that needs this rank, the job ends with RANK_FINISHED. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_session_finish(
    gradsync_session_t* session);
/* Why a call of this session or of its layouts still waits, for people: TakeNotice() in
 * gradsync/client.h. Writes at most `size` bytes, the last of them NUL, and returns the number of
 * bytes before the NUL. 0: there is no notice. GRADSYNC_NOTICE_SIZE bytes hold every notice. */
#define GRADSYNC_NOTICE_SIZE 2048
GRADSYNC_EXPORT size_t gradsync_session_take_notice(gradsync_session_t* session, char* text,
                                                    size_t size);
/* 1 if the session has ended: every later call fails, so join again. 0: it goes on, even if a call
 * has returned an error. Never blocks. */
GRADSYNC_EXPORT int gradsync_session_has_ended(const gradsync_session_t* session);
/* Waits for the session's end and returns why it ended. NULL: it has not ended within `timeout`. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_session_await_end(
    gradsync_session_t* session, int64_t timeout);
/* Blocks until every rank has left. Then the ranks that stayed take part again. `last_to_leave`:
 * which of them left last. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_session_leave_and_stay(
    gradsync_session_t* session, int64_t timeout, uint32_t* last_to_leave);

typedef struct gradsync_statistics {
  size_t struct_size;
  uint64_t steps_complete;
  uint64_t steps_void;
  uint64_t buckets_marked;
  uint64_t bytes_reduced;   /* in this rank's arenas, complete steps only */
  int64_t mark_ready_total; /* ns in mark_ready(), and in finish_step() if that marks buckets */
  int64_t exposed_total;    /* from a step's last mark to its verdict, summed, in ns */
} gradsync_statistics_t;

static inline void gradsync_statistics_init(gradsync_statistics_t* statistics) {
  memset(statistics, 0, sizeof(*statistics));
  statistics->struct_size = sizeof(*statistics);
}
/* Fills the members for which `statistics->struct_size` has room. */
GRADSYNC_EXPORT void gradsync_session_statistics(const gradsync_session_t* session,
                                                 gradsync_statistics_t* statistics);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GRADSYNC_GRADSYNC_H_ */
