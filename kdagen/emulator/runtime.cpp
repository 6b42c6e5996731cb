// The emulator's entry points: what kernel modules call (launch, builtins, memory hooks) and what Python calls.
//
// Kernel modules are compiled with -fsanitize=thread and linked against this file's __tsan_* in place of
// ThreadSanitizer's: the compiler inserts a call before every memory access of the kernel's own text.
#include <cmath>
#include <thread>

#include "math.h"
#include "worker.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
thread_local Launch *current_launch = nullptr;
}

EXPORT int kdaemu_launch(const void *kernel, Invoke invoke, unsigned long long workgroups, unsigned threads,
                         void **arguments) {
  Launch &launch = *current_launch;
  launch.memory.start_launch();
  std::vector<uint64_t> order(workgroups);
  std::iota(order.begin(), order.end(), 0);
  if (launch.options.lane_order_seed >= 0) {
    std::shuffle(order.begin(), order.end(), std::mt19937_64(launch.options.lane_order_seed));
  }
  std::atomic<uint64_t> next{0};
  auto work = [&] {
    Worker worker(launch, kernel, invoke, arguments, threads);
    for (uint64_t i; (i = next.fetch_add(1)) < workgroups;) worker.run(order[i]);
  };
  std::vector<std::thread> helpers;
  const uint64_t wanted = std::min<uint64_t>(launch.options.threads, workgroups);
  for (uint64_t i = 1; i < wanted; ++i) helpers.emplace_back(work);
  work();
  for (std::thread &helper : helpers) helper.join();
  launch.report.count_workgroups(workgroups);
  return 0;
}

// Calls a module's launcher with its parameters; the memory it may touch is in `intervals`, sorted and disjoint.
EXPORT int kdaemu_run(int (*launcher)(const void *params, void *stream), const void *params,
                      const KdaemuInterval *intervals, int64_t count, const KdaemuOptions *options,
                      KdaemuReport *report) {
  Launch launch{*options, Report(*report), Memory(intervals, count)};
  current_launch = &launch;
  const int status = launcher(params, nullptr);
  current_launch = nullptr;
  return status;
}

EXPORT unsigned kdaemu_thread() { return Worker::current->lane(); }
EXPORT unsigned kdaemu_workgroup() { return static_cast<unsigned>(Worker::current->workgroup()); }
EXPORT void kdaemu_barrier() { Worker::current->barrier(); }
EXPORT void kdaemu_fence(int order) { Worker::current->fence(order); }

EXPORT int kdaemu_update_dpp(int old, int source, int control, int row_mask, int bank_mask, bool bound_ctrl) {
  WaveRequest request;
  request.op = WaveOp::kDpp;
  request.control = control;
  request.row_mask = row_mask;
  request.bank_mask = bank_mask;
  request.bound_ctrl = bound_ctrl;
  request.value = source;
  request.old = old;
  return Worker::current->wave_op(request);
}

EXPORT int kdaemu_readlane(int value, int lane) {
  WaveRequest request;
  request.op = WaveOp::kReadLane;
  request.control = lane;
  request.value = value;
  return Worker::current->wave_op(request);
}

EXPORT int kdaemu_readfirstlane(int value) {
  WaveRequest request;
  request.op = WaveOp::kReadFirstLane;
  request.value = value;
  return Worker::current->wave_op(request);
}

static float hardware_math(int function, float a) {
  const KdaemuOptions &options = Worker::current->options();
  if (options.math != kExact) a = flushed(a);
  const double x = a;
  const double exact = function == 0 ? std::exp2(x) : function == 1 ? std::log2(x) : function == 2 ? 1 / x : 1 / std::sqrt(x);
  return approximate(exact, a, function, options);
}
EXPORT float kdaemu_exp2(float a) { return hardware_math(0, a); }
EXPORT float kdaemu_log2(float a) { return hardware_math(1, a); }
EXPORT float kdaemu_rcp(float a) { return hardware_math(2, a); }
EXPORT float kdaemu_rsq(float a) { return hardware_math(3, a); }

static inline void note(const void *address, size_t bytes, bool is_write) {
  Worker *worker = Worker::current;
  if (worker != nullptr && bytes != 0) worker->access(reinterpret_cast<uintptr_t>(address), bytes, is_write);
}

#define HOOKS(bytes)                                                                     \
  EXPORT void __tsan_read##bytes(void *a) { note(a, bytes, false); }                     \
  EXPORT void __tsan_write##bytes(void *a) { note(a, bytes, true); }                     \
  EXPORT void __tsan_unaligned_read##bytes(void *a) { note(a, bytes, false); }           \
  EXPORT void __tsan_unaligned_write##bytes(void *a) { note(a, bytes, true); }           \
  EXPORT void __tsan_volatile_read##bytes(void *a) { note(a, bytes, false); }            \
  EXPORT void __tsan_volatile_write##bytes(void *a) { note(a, bytes, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
EXPORT void __tsan_read_range(void *a, size_t bytes) { note(a, bytes, false); }
EXPORT void __tsan_write_range(void *a, size_t bytes) { note(a, bytes, true); }
EXPORT void __tsan_init() {}
EXPORT void __tsan_func_entry(void *) {
  if (Worker *worker = Worker::current) worker->enter_function(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)));
}
EXPORT void __tsan_func_exit() {}

// Block copies: clang calls these itself; the shim sends the text's own __builtin_mem* here, which GCC expands unchecked.
EXPORT void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
  note(from, bytes, false);
  note(to, bytes, true);
  return std::memcpy(to, from, bytes);
}
EXPORT void *__tsan_memmove(void *to, const void *from, size_t bytes) {
  note(from, bytes, false);
  note(to, bytes, true);
  return std::memmove(to, from, bytes);
}
EXPORT void *__tsan_memset(void *to, int value, size_t bytes) {
  note(to, bytes, true);
  return std::memset(to, value, bytes);
}
