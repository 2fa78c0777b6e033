/* gradsync's C API: the C++ API of gradsync/client.h for everything that speaks C. Plain C99.
 *
 * gradsync/client.h documents what each call does and which errors it can give; this header says
 * what is different in C.
 *
 * Errors. A function that can fail returns a gradsync_error_t*: NULL is success, anything else is
 * the caller's and must be given to gradsync_error_destroy(). Out parameters are written on success
 * only. Nothing here aborts, prints, throws or installs signal handlers.
 *
 * GRADSYNC_UNAVAILABLE with reason "DAEMON_SILENT" comes from a wait while gradsyncd is stopped or
 * hangs; the session lives on, and gradsync_wait_step(), gradsync_wait_bucket() and
 * gradsync_session_leave_and_stay() can be repeated.
 *
 * Ownership. What a function hands out through a `**` parameter is the caller's, to be given to its
 * _destroy() function; each _destroy() accepts NULL. Pointers that functions return otherwise
 * belong to the object they were asked of and live as long as it does. What the caller passes in is
 * copied before the function returns. A layout may outlive its session; views of its memory are
 * valid while the layout or a gradsync_mapping_t of it lives.
 *
 * Threads. Every function may be called from any thread at any time, but an object must not be
 * destroyed while another thread still uses it. After fork(2), calls in the child fail with
 * GRADSYNC_FAILED_PRECONDITION and _destroy() functions do nothing.
 *
 * Strings are UTF-8 and end with NUL. Durations are nanoseconds; GRADSYNC_FOREVER is unbounded.
 *
 * Compatibility. Structs that begin with `struct_size` may grow at their end: set it with the
 * struct's _init() function, or to sizeof the struct with every other byte 0, which means the
 * defaults. The _init() functions are compiled into the program, with its own sizeof; the library
 * reads and writes no more than `struct_size` bytes: members beyond it count as 0 and are not given
 * out. So a program of an older header runs with a newer library of the same GRADSYNC_ABI_VERSION.
 * Only `struct_size` and, where there is one, `storage` must be there. All other structs (also
 * those in arrays that the library hands out, as gradsync_bucket_times_t), and the numbers of
 * enumerations, are fixed for one GRADSYNC_ABI_VERSION; functions are only added. A program can
 * compare GRADSYNC_ABI_VERSION, what it was compiled for, with gradsync_abi_version(), what it runs
 * with.
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

/* gRPC's numbers. */
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

/* These accept NULL, which is GRADSYNC_OK with empty strings. */
GRADSYNC_EXPORT gradsync_code_t gradsync_error_code(const gradsync_error_t* error);
GRADSYNC_EXPORT const char* gradsync_error_message(const gradsync_error_t* error);
/* For programs: "RANK_LOST", "STEP_TIMEOUT", ... or "". */
GRADSYNC_EXPORT const char* gradsync_error_reason(const gradsync_error_t* error);
/* `field`: "job", "rank", "channel", "step" or "bucket". "" if the error has no such field. */
GRADSYNC_EXPORT const char* gradsync_error_field(const gradsync_error_t* error, const char* field);
GRADSYNC_EXPORT void gradsync_error_destroy(gradsync_error_t* error);
/* "ABORTED"; "" for a number that is none of the above. */
GRADSYNC_EXPORT const char* gradsync_code_name(gradsync_code_t code);

/* ---- Joining a job --------------------------------------------------------------------------- */

typedef enum gradsync_data_type {
  GRADSYNC_FLOAT32 = 1,
  GRADSYNC_FLOAT64 = 2,
  GRADSYNC_FLOAT16 = 3,
  GRADSYNC_BFLOAT16 = 4
} gradsync_data_type_t;

/* For each of these 0 is the default, which is named. */
typedef enum gradsync_reduce_op {
  GRADSYNC_SUM = 1,
  GRADSYNC_AVERAGE = 2 /* default */
} gradsync_reduce_op_t;

typedef enum gradsync_divisor {
  GRADSYNC_LIVE_RANKS = 1, /* default */
  GRADSYNC_WORLD = 2
} gradsync_divisor_t;

typedef enum gradsync_loss_policy {
  GRADSYNC_ABORT = 1, /* default */
  GRADSYNC_HOLD = 2,
  GRADSYNC_CONTINUE = 3
} gradsync_loss_policy_t;

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
  GRADSYNC_NCCL_WIRE_AUTO = 0,     /* default: 16-bit types as float32, others as they are */
  GRADSYNC_NCCL_WIRE_SAME = 1,     /* as they are */
  GRADSYNC_NCCL_WIRE_BFLOAT16 = 2, /* float32 as bfloat16, others as they are */
  GRADSYNC_NCCL_WIRE_FLOAT16 = 3   /* float32 as float16: Inf if too large; others as they are */
} gradsync_nccl_wire_type_t;

/* Bytes of one element; 0 for a number that is no data type. */
GRADSYNC_EXPORT size_t gradsync_item_size(int32_t data_type);

typedef struct gradsync_session_options {
  size_t struct_size;
  void* storage;      /* the library's; NULL unless _from_environment() filled the struct */
  const char* socket; /* NULL: /run/gradsync/gradsyncd.sock */
  const char* job_id;
  const char* token; /* NULL: none */
  uint32_t rank;
  uint32_t world_size;
  int32_t on_rank_loss;    /* gradsync_loss_policy_t */
  int32_t divisor;         /* gradsync_divisor_t */
  int64_t step_timeout;    /* 0: the daemon's default, 30 min */
  int64_t connect_timeout; /* 0: 60 s; negative: do not wait */
  /* "host" or "host:port" of the daemon on rank 0's node; NULL: the job is on this node. */
  const char* coordinator;
  /* How gradients are summed between GPUs, the same on every rank. */
  uint32_t nccl_max_ctas; /* thread blocks of NCCL's kernels; 0: NCCL's choice */
  int32_t nccl_algorithm; /* gradsync_nccl_algorithm_t */
  int32_t nccl_protocol;  /* gradsync_nccl_protocol_t */
  int32_t nccl_wire_type; /* gradsync_nccl_wire_type_t */
} gradsync_session_options_t;

static inline void gradsync_session_options_init(gradsync_session_options_t* options) {
  memset(options, 0, sizeof(*options));
  options->struct_size = sizeof(*options);
}
/* Fills `options` from torchrun's variables. Its strings live until
 * gradsync_session_options_destroy(), which makes `options` as after its _init(). */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_session_options_from_environment(
    gradsync_session_options_t* options);
GRADSYNC_EXPORT void gradsync_session_options_destroy(gradsync_session_options_t* options);

GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_session_join(
    const gradsync_session_options_t* options, gradsync_session_t** session);
/* Without gradsync_session_leave() before it, the other ranks lose this one. */
GRADSYNC_EXPORT void gradsync_session_destroy(gradsync_session_t* session);

GRADSYNC_EXPORT uint32_t gradsync_session_rank(const gradsync_session_t* session);
GRADSYNC_EXPORT uint32_t gradsync_session_world_size(const gradsync_session_t* session);
GRADSYNC_EXPORT uint64_t gradsync_session_generation(const gradsync_session_t* session);
GRADSYNC_EXPORT uint64_t gradsync_session_incarnation(const gradsync_session_t* session);

/* ---- Layouts --------------------------------------------------------------------------------- */

typedef struct gradsync_parameter {
  const char* name;
  const uint64_t* shape;
  size_t dimensions;
  int32_t data_type; /* gradsync_data_type_t */
} gradsync_parameter_t;

typedef struct gradsync_explicit_bucket {
  uint64_t count;
  int32_t data_type; /* gradsync_data_type_t */
} gradsync_explicit_bucket_t;

/* Either parameters or explicit buckets. */
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
  /* Most bytes of the bucket that is ready last; 0: no such cap. What is reduced last is waited
   * for, so it is split off the bucket if that is larger. See LayoutSpec in gradsync/client.h. */
  uint64_t last_bucket_cap_bytes;
  /* UUID of the GPU on which the buckets lie, see gradsync_cuda_device_uuid(); NULL: host memory.
   * Every rank names one, its own, or none does. */
  const char* device;
} gradsync_layout_spec_t;

static inline void gradsync_layout_spec_init(gradsync_layout_spec_t* spec) {
  memset(spec, 0, sizeof(*spec));
  spec->struct_size = sizeof(*spec);
}

GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_register_layout(
    gradsync_session_t* session, const gradsync_layout_spec_t* spec, gradsync_layout_t** layout);
/* `old` is still the caller's to destroy. On failure it is as before. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_replace_layout(
    gradsync_session_t* session, gradsync_layout_t* old, const gradsync_layout_spec_t* spec,
    gradsync_layout_t** layout);
GRADSYNC_EXPORT void gradsync_layout_destroy(gradsync_layout_t* layout);

GRADSYNC_EXPORT const char* gradsync_layout_name(const gradsync_layout_t* layout);
GRADSYNC_EXPORT uint64_t gradsync_layout_fingerprint(const gradsync_layout_t* layout);
GRADSYNC_EXPORT size_t gradsync_layout_bucket_count(const gradsync_layout_t* layout);
GRADSYNC_EXPORT size_t gradsync_layout_parameter_count(const gradsync_layout_t* layout);
/* UUID of the GPU on which it lies; "": host memory. */
GRADSYNC_EXPORT const char* gradsync_layout_device(const gradsync_layout_t* layout);

typedef struct gradsync_view {
  void* data;        /* on a GPU its address there */
  uint64_t count;    /* elements */
  uint32_t bucket;   /* the bucket itself, or the one that the gradient lies in */
  int32_t data_type; /* gradsync_data_type_t */
} gradsync_view_t;

/* GRADSYNC_INVALID_ARGUMENT if there is no such bucket or parameter. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_layout_bucket(
    const gradsync_layout_t* layout, size_t bucket, gradsync_view_t* view);
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_layout_gradient(
    const gradsync_layout_t* layout, size_t parameter, gradsync_view_t* view);

/* Keeps the layout's memory mapped. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_layout_mapping(
    const gradsync_layout_t* layout, gradsync_mapping_t** mapping);
GRADSYNC_EXPORT void gradsync_mapping_destroy(gradsync_mapping_t* mapping);

/* ---- Steps ----------------------------------------------------------------------------------- */

GRADSYNC_EXPORT uint64_t gradsync_next_step(const gradsync_layout_t* layout);

/* This rank did not use the parameter in this step; call before its bucket is marked ready. Its
 * gradient becomes zeros, and gradsync_wait_step() puts back what it held if no rank used it. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_mark_unused(gradsync_layout_t* layout,
                                                                         uint64_t step,
                                                                         size_t parameter);
/* Never blocks. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_mark_ready(gradsync_layout_t* layout,
                                                                        uint64_t step,
                                                                        size_t bucket);
/* `used`: parameter_count bytes, 0 for a parameter that this rank did not use; NULL: it used all.
 */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_end_step(gradsync_layout_t* layout,
                                                                      uint64_t step,
                                                                      const uint8_t* used);
/* gradsync_mark_ready() of every bucket that was not, and gradsync_end_step(), in one message. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_finish_step(gradsync_layout_t* layout,
                                                                         uint64_t step,
                                                                         const uint8_t* used);
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_abandon_step(gradsync_layout_t* layout,
                                                                          uint64_t step,
                                                                          const char* reason);
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_wait_bucket(gradsync_layout_t* layout,
                                                                         uint64_t step,
                                                                         size_t bucket,
                                                                         int64_t timeout);

/* ---- Steps of a layout on a GPU ---------------------------------------------------------------
 */
/* Handed over in the order of the trainer's streams; see Layout in gradsync/client.h. A stream is a
 * CUstream, which is also a cudaStream_t; NULL is the legacy default stream. gradsync_end_step(),
 * gradsync_wait_step() and the others above are for these layouts too. */

/* Instead of a bucket. */
#define GRADSYNC_EVERY_BUCKET SIZE_MAX

/* "Every gradient of this bucket is written once these streams get here." Never waits for the GPU.
 * gradsync_mark_ready() is for host memory alone, as gradsync_finish_step() is. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_mark_ready_on_streams(
    gradsync_layout_t* layout, uint64_t step, size_t bucket, void* const* streams,
    size_t stream_count);
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_finish_step_on_streams(
    gradsync_layout_t* layout, uint64_t step, const uint8_t* used, void* const* streams,
    size_t stream_count);
/* What is enqueued on `stream` from now on runs when the bucket, or GRADSYNC_EVERY_BUCKET, is
 * reduced, which says nothing about the step's verdict. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_wait_on_stream(
    gradsync_layout_t* layout, uint64_t step, size_t bucket, void* stream);
/* Address, on the GPU, of a float that is 0 if the step is complete and 1 if it is void: what
 * optimizers take as `found_inf`. To be read on a stream behind
 * gradsync_wait_on_stream(GRADSYNC_EVERY_BUCKET). NULL in host memory. Where it may be 0 on some
 * rank, gradsync_wait_step() calls the step void on none: it is complete, or STEP_IN_DOUBT. */
GRADSYNC_EXPORT const float* gradsync_device_verdict(const gradsync_layout_t* layout,
                                                     uint64_t step);

/* "GPU-" or "MIG-", 36 characters and NUL. */
#define GRADSYNC_DEVICE_UUID_SIZE 41
/* UUID of the GPU that CUDA calls `ordinal` in this process. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_cuda_device_uuid(
    int32_t ordinal, char uuid[GRADSYNC_DEVICE_UUID_SIZE]);

/* ---- Verdicts -------------------------------------------------------------------------------- */

/* CLOCK_MONOTONIC nanoseconds. */
typedef struct gradsync_bucket_times {
  const uint64_t* ready_ns; /* one per rank */
  size_t rank_count;
  uint64_t start_ns;
  uint64_t finish_ns;
} gradsync_bucket_times_t;

typedef struct gradsync_bucket_numbers {
  double sum_of_squares; /* of the result's elements; NaN or Inf if one is */
  uint64_t non_finite;   /* elements that are NaN or Inf */
} gradsync_bucket_numbers_t;

typedef struct gradsync_step_result {
  size_t struct_size;
  void* storage; /* the library's */
  uint64_t step;
  uint32_t live_ranks;
  uint32_t divisor;
  const uint8_t* used; /* per parameter, 1 if some rank used it; NULL: every rank used every one */
  size_t used_count;
  const gradsync_bucket_times_t* buckets;
  size_t bucket_count;
  const gradsync_bucket_numbers_t* numbers; /* one per bucket; NULL: the daemon did not say */
  size_t number_count;
} gradsync_step_result_t;

static inline void gradsync_step_result_init(gradsync_step_result_t* result) {
  memset(result, 0, sizeof(*result));
  result->struct_size = sizeof(*result);
}
/* `result` may be NULL. It is overwritten, not destroyed, by this call. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_wait_step(
    gradsync_layout_t* layout, uint64_t step, int64_t timeout, gradsync_step_result_t* result);
/* Frees what a result points to, and makes it as after its _init(); the struct itself is the
 * caller's. */
GRADSYNC_EXPORT void gradsync_step_result_destroy(gradsync_step_result_t* result);

/* Gradient clipping without a pass over the gradients; see GradientNorm() in gradsync/client.h.
 * NaN if `result` is NULL or holds no numbers. */
GRADSYNC_EXPORT double gradsync_gradient_norm(const gradsync_step_result_t* result);
/* min(1, max_norm / (norm + 1e-6)). A norm of NaN gives NaN, one of Inf gives 0. */
GRADSYNC_EXPORT double gradsync_clip_coefficient(double norm, double max_norm);

/* ---- The job's own operations ---------------------------------------------------------------- */

GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_barrier(gradsync_session_t* session,
                                                                     int64_t timeout);
/* Instead of a root: the lowest rank that has not left. */
#define GRADSYNC_LOWEST_LIVE_RANK UINT32_MAX
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_broadcast(gradsync_session_t* session,
                                                                       void* data, size_t bytes,
                                                                       uint32_t root,
                                                                       int64_t timeout);
/* `op`: 0 is the average. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_all_reduce(gradsync_session_t* session,
                                                                        void* data, size_t count,
                                                                        int32_t data_type,
                                                                        int32_t op,
                                                                        int64_t timeout);

GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_session_leave(
    gradsync_session_t* session);
/* Blocks until every rank has left; then those that stayed take part again. */
GRADSYNC_EXPORT GRADSYNC_MUST_USE gradsync_error_t* gradsync_session_leave_and_stay(
    gradsync_session_t* session, int64_t timeout, uint32_t* last_joiner);

typedef struct gradsync_statistics {
  size_t struct_size;
  uint64_t steps_complete;
  uint64_t steps_void;
  uint64_t buckets_marked;
  uint64_t bytes_reduced;
  int64_t mark_ready_total; /* ns */
  int64_t exposed_total;    /* ns */
} gradsync_statistics_t;

static inline void gradsync_statistics_init(gradsync_statistics_t* statistics) {
  memset(statistics, 0, sizeof(*statistics));
  statistics->struct_size = sizeof(*statistics);
}
/* Fills what `statistics->struct_size` has room for. */
GRADSYNC_EXPORT void gradsync_session_statistics(const gradsync_session_t* session,
                                                 gradsync_statistics_t* statistics);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GRADSYNC_GRADSYNC_H_ */
