// The emulator: workgroups over threads, lanes as fibers in wave64 lock step, every memory access of the kernel checked
// before it happens. Kernel modules are compiled with -fsanitize=thread and linked against this file's __tsan_* in place
// of ThreadSanitizer's, so the checks see the accesses of the kernel's own text and nothing has to be rewritten.
#include "runtime.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "fiber.h"
#include "math.h"
#include "memory.h"
#include "wave.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Invoke = void (*)(const void *kernel, void **arguments);

struct Launch {
  const KdaemuOptions &options;
  KdaemuReport &report;
  Memory memory;
  std::mutex report_mutex;
  std::atomic<bool> stop{false};
};

thread_local Launch *current_launch = nullptr;

enum class LaneState { kReady, kAtBarrier, kAtWaveOp, kDone };

struct Lane {
  Fiber fiber;
  LaneState state = LaneState::kReady;
  WaveRequest request;
  bool unreleased_write = false;  // LDS written, no release fence since
  bool acquired = true;           // an acquire fence since the last barrier
};

// One host thread: runs one workgroup at a time.
class Worker {
 public:
  Worker(Launch &launch, const void *kernel, Invoke invoke, void **arguments, int threads)
      : launch_(launch), kernel_(kernel), invoke_(invoke), arguments_(arguments), lanes_(threads), stacks_(threads),
        lds_(launch.options.lds_bytes), lane_order_(threads), wave_order_((threads + kWaveLanes - 1) / kWaveLanes) {}

  void run(uint64_t workgroup);

  // Called by lanes.
  static thread_local Worker *current;
  unsigned lane() const { return lane_; }
  uint64_t workgroup() const { return workgroup_; }
  const KdaemuOptions &options() const { return launch_.options; }
  int wave_op(const WaveRequest &request);
  void barrier();
  void fence(int order);
  void access(uintptr_t address, unsigned bytes, bool is_write);

 private:
  static void entry();
  void yield() { fiber_switch(lanes_[lane_].fiber, scheduler_); }
  void resume(int lane);
  bool run_wave(int wave);
  bool finish_wave_op(int wave);
  bool release_barrier();
  std::string lanes_in(LaneState state, bool others) const;
  bool lds_access(uintptr_t address, unsigned bytes, bool is_write);
  uint64_t now() const { return Access::pack(workgroup_, epoch_, lane_); }

  void fault(FaultKind kind, const std::string &what);
  [[noreturn]] void abandon(FaultKind kind, const std::string &what) {
    fault(kind, what);
    abandoned_ = true;
    yield();
    std::abort();  // an abandoned workgroup is never resumed
  }

  Launch &launch_;
  const void *kernel_;
  Invoke invoke_;
  void **arguments_;
  std::vector<Lane> lanes_;
  Stacks stacks_;
  Lds lds_;
  std::vector<int> lane_order_, wave_order_;
  std::mt19937_64 random_;
  Fiber scheduler_;
  unsigned lane_ = 0;
  uint64_t workgroup_ = 0;
  uint64_t epoch_ = 0;  // barriers passed
  bool in_lane_ = false, abandoned_ = false, raced_ = false;
};

thread_local Worker *Worker::current = nullptr;

void Worker::entry() {
  Worker &w = *current;
  w.invoke_(w.kernel_, w.arguments_);
  w.lanes_[w.lane_].state = LaneState::kDone;
  w.yield();
  std::abort();
}

void Worker::resume(int lane) {
  lane_ = lane;
  in_lane_ = true;
  fiber_switch(scheduler_, lanes_[lane].fiber);
  in_lane_ = false;
}

void Worker::run(uint64_t workgroup) {
  current = this;
  workgroup_ = workgroup;
  epoch_ = 0;
  abandoned_ = raced_ = false;
  lds_.start();
  std::iota(lane_order_.begin(), lane_order_.end(), 0);
  std::iota(wave_order_.begin(), wave_order_.end(), 0);
  const bool shuffled = options().lane_order_seed >= 0;
  if (shuffled) random_.seed(static_cast<uint64_t>(options().lane_order_seed) * 1000003 + workgroup);
  for (size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i].state = LaneState::kReady;
    lanes_[i].unreleased_write = false;
    lanes_[i].acquired = true;
    fiber_make(lanes_[i].fiber, stacks_.of(i), Stacks::kBytes, entry);
  }
  do {
    if (shuffled) std::shuffle(wave_order_.begin(), wave_order_.end(), random_);
    for (int wave : wave_order_) {
      const auto first = lane_order_.begin() + wave * kWaveLanes;
      const auto last = lane_order_.begin() + std::min<size_t>(lanes_.size(), (wave + 1) * kWaveLanes);
      do {
        if (shuffled) std::shuffle(first, last, random_);
      } while (run_wave(wave) && !abandoned_);
      if (abandoned_) break;
    }
  } while (!abandoned_ && release_barrier());
  current = nullptr;
}

// Runs every ready lane of a wave until it blocks; true if a wave operation finished and lanes are ready again.
bool Worker::run_wave(int wave) {
  const int first = wave * kWaveLanes, last = std::min<int>(lanes_.size(), first + kWaveLanes);
  for (int i = first; i < last; ++i) {
    const int lane = lane_order_[i];
    if (lanes_[lane].state == LaneState::kReady) resume(lane);
    if (abandoned_) return false;
  }
  return finish_wave_op(wave);
}

bool Worker::finish_wave_op(int wave) {
  const int first = wave * kWaveLanes, count = std::min<int>(lanes_.size() - first, kWaveLanes);
  WaveRequest *requests[kWaveLanes] = {};
  uint64_t active = 0;
  int lowest = -1, done = 0;
  for (int i = 0; i < count; ++i) {
    Lane &lane = lanes_[first + i];
    requests[i] = &lane.request;
    done += lane.state == LaneState::kDone;
    if (lane.state != LaneState::kAtWaveOp) continue;
    active |= uint64_t{1} << i;
    if (lowest < 0) lowest = i;
  }
  if (lowest < 0) return false;
  const WaveRequest &request = *requests[lowest];
  const char *name = request.op == WaveOp::kDpp ? "DPP" : "lane read";
  lane_ = first + lowest;
  const int waiting = __builtin_popcountll(active);
  if (waiting != count && !(options().allow_inactive_lanes && waiting + done == count)) {
    fault(kDivergence, std::string("a ") + name + " is not reached by lanes " + lanes_in(LaneState::kAtWaveOp, true));
    return abandoned_ = true, false;
  }
  for (int i = 0; i < count; ++i) {
    if (!(active >> i & 1)) continue;
    if (!request.agrees_with(*requests[i])) {
      fault(kDivergence, std::string("lanes of a wave meet at different ") + name + " operations");
      return abandoned_ = true, false;
    }
    if (request.op == WaveOp::kReadFirstLane && requests[i]->value != request.value) {
      fault(kNotUniform, "a value promised to be the same for a wave is " + std::to_string(request.value) +
                             " in lane " + std::to_string(lowest) + " and " + std::to_string(requests[i]->value) +
                             " in lane " + std::to_string(i));
      return abandoned_ = true, false;
    }
  }
  if (request.op == WaveOp::kDpp) {
    if (dpp_source(request.control, 0) == kUnknown) {
      fault(kBadDpp, "no such DPP control: " + std::to_string(request.control));
      return abandoned_ = true, false;
    }
    run_dpp(requests, active);
  }
  for (int i = 0; i < count; ++i) {
    if (!(active >> i & 1)) continue;
    if (request.op == WaveOp::kReadFirstLane) requests[i]->result = request.value;
    if (request.op == WaveOp::kReadLane) requests[i]->result = requests[request.control % count]->value;
    lanes_[first + i].state = LaneState::kReady;
  }
  return true;
}

// Every lane is blocked or done: lets a complete barrier go; true if lanes are ready again.
bool Worker::release_barrier() {
  size_t waiting = 0;
  for (const Lane &lane : lanes_) waiting += lane.state == LaneState::kAtBarrier;
  if (waiting == 0) return false;
  if (waiting != lanes_.size()) {
    lane_ = 0;
    fault(kDivergence, "a barrier is not reached by lanes " + lanes_in(LaneState::kAtBarrier, true));
    return false;
  }
  ++epoch_;
  for (Lane &lane : lanes_) {
    lane.state = LaneState::kReady;
    lane.acquired = false;
  }
  return true;
}

// Such as "0-15, 64-255": the lanes in a state, or those in any other.
std::string Worker::lanes_in(LaneState state, bool others) const {
  std::string text;
  for (size_t i = 0; i < lanes_.size();) {
    size_t end = i;
    while (end < lanes_.size() && (lanes_[end].state == state) != others) ++end;
    if (end > i) {
      text += (text.empty() ? "" : ", ") + std::to_string(i) + (end - i > 1 ? "-" + std::to_string(end - 1) : "");
    }
    i = std::max(end, i + 1);
  }
  return text;
}

int Worker::wave_op(const WaveRequest &request) {
  Lane &lane = lanes_[lane_];
  lane.request = request;
  lane.state = LaneState::kAtWaveOp;
  yield();
  return lane.request.result;
}

void Worker::barrier() {
  Lane &lane = lanes_[lane_];
  if (lane.unreleased_write) fault(kMissingFence, "LDS was written and no release fence stands before the barrier");
  lane.unreleased_write = false;
  lane.state = LaneState::kAtBarrier;
  yield();
}

void Worker::fence(int order) {
  if (order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST) {
    lanes_[lane_].unreleased_write = false;
  }
  if (order == __ATOMIC_ACQUIRE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST) {
    lanes_[lane_].acquired = true;
  }
}

std::string access_text(bool is_write, unsigned bytes) {
  return std::string(is_write ? "a write" : "a read") + " of " + std::to_string(bytes) + " bytes";
}

void Worker::access(uintptr_t address, unsigned bytes, bool is_write) {
  if (!in_lane_ || stacks_.contains(address)) return;
  const Interval *interval = launch_.memory.find(address, bytes);
  if (interval == nullptr) {
    if (lds_access(address, bytes, is_write)) return;
    if (!is_write && lds_.module_holds(address)) return;  // a constant of the kernel's own file
    abandon(kGlobalBounds, access_text(is_write, bytes) + " " + launch_.memory.place_of(address));
  }
  if (!interval->writable()) {
    if (is_write) abandon(kReadOnly, access_text(is_write, bytes) + " " + launch_.memory.place_of(address));
    return;
  }
  const uint64_t racing = interval->note(address, bytes, now(), is_write);
  if (racing != 0 && !raced_) {
    raced_ = true;
    fault(kRace, access_text(is_write, bytes) + " " + launch_.memory.place_of(address) + " races with " +
                     (Access::workgroup(racing) == workgroup_
                          ? "lane " + std::to_string(Access::lane(racing))
                          : "workgroup " + std::to_string(Access::workgroup(racing))));
  }
}

// True if the address is in the workgroup's LDS; faults there are found here.
bool Worker::lds_access(uintptr_t address, unsigned bytes, bool is_write) {
  if (!lds_.contains(address, reinterpret_cast<uintptr_t>(kernel_))) return false;
  const size_t offset = lds_.offset(address);
  const std::string place = "LDS byte " + std::to_string(offset);
  if (offset + bytes > lds_.bytes()) {
    abandon(kLdsBounds, access_text(is_write, bytes) + " at " + place + " of " + std::to_string(lds_.bytes()));
  }
  Lane &lane = lanes_[lane_];
  if (is_write) {
    lane.unreleased_write = true;
  } else {
    if (!lds_.written(offset, bytes, workgroup_)) {
      fault(kUninitialisedLds, access_text(is_write, bytes) + " at " + place + " that nobody wrote");
    }
    if (!lane.acquired) fault(kMissingFence, "LDS is read and no acquire fence stands after the barrier");
  }
  const uint64_t racing = lds_.note(offset, bytes, now(), is_write);
  if (racing != 0 && !raced_) {
    raced_ = true;
    fault(kRace, access_text(is_write, bytes) + " at " + place + " races with lane " +
                     std::to_string(Access::lane(racing)));
  }
  return true;
}

// Faults of one kind share an entry: the first message and a count.
void Worker::fault(FaultKind kind, const std::string &what) {
  const std::lock_guard<std::mutex> lock(launch_.report_mutex);
  KdaemuReport &report = launch_.report;
  for (int i = 0; i < report.faults; ++i) {
    if (report.fault[i].kind == kind) {
      ++report.fault[i].count;
      return;
    }
  }
  if (report.faults == kMaxFaults) return;
  KdaemuFault &fault = report.fault[report.faults++];
  fault.kind = kind;
  fault.count = 1;
  std::snprintf(fault.message, kMessageBytes, "workgroup %llu, lane %u, after %llu barriers: %s",
                static_cast<unsigned long long>(workgroup_), lane_, static_cast<unsigned long long>(epoch_),
                what.c_str());
}

}  // namespace

EXPORT int kdaemu_launch(const void *kernel, Invoke invoke, unsigned long long workgroups, unsigned threads,
                         void **arguments) {
  Launch &launch = *current_launch;
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
  launch.report.workgroups += workgroups;
  return 0;
}

// Calls a module's launcher with its parameters; the memory it may touch is in `intervals`, sorted and disjoint.
EXPORT int kdaemu_run(int (*launcher)(const void *params, void *stream), const void *params,
                      const KdaemuInterval *intervals, int64_t count, const KdaemuOptions *options,
                      KdaemuReport *report) {
  Launch launch{*options, *report, Memory(intervals, count), {}, {}};
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

EXPORT float kdaemu_math(int function, float a, const KdaemuOptions *options) {
  if (options->math != kExact) a = flushed(a);
  const double x = a;
  const double exact = function == 0 ? std::exp2(x) : function == 1 ? std::log2(x) : function == 2 ? 1 / x : 1 / std::sqrt(x);
  return approximate(exact, a, function, *options);
}
EXPORT float kdaemu_exp2(float a) { return kdaemu_math(0, a, &Worker::current->options()); }
EXPORT float kdaemu_log2(float a) { return kdaemu_math(1, a, &Worker::current->options()); }
EXPORT float kdaemu_rcp(float a) { return kdaemu_math(2, a, &Worker::current->options()); }
EXPORT float kdaemu_rsq(float a) { return kdaemu_math(3, a, &Worker::current->options()); }

static inline void note(const void *address, unsigned bytes, bool is_write) {
  if (Worker *worker = Worker::current) worker->access(reinterpret_cast<uintptr_t>(address), bytes, is_write);
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
EXPORT void __tsan_func_entry(void *) {}
EXPORT void __tsan_func_exit() {}
