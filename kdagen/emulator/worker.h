// One host thread of the emulator: it runs a workgroup at a time, its lanes as fibers in wave64 lock step, and checks
// every memory access of the kernel before it happens.
#pragma once

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "report.h"
#include "runtime.h"
#include "wave.h"

using Invoke = void (*)(const void *kernel, void **arguments);

struct Launch {
  const KdaemuOptions &options;
  Report report;
  Memory memory;
};

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
  void access(uintptr_t address, size_t bytes, bool is_write);
  void enter_function(uintptr_t frame);

 private:
  static void entry();
  void yield() { fiber_switch(lanes_[lane_].fiber, scheduler_); }
  void resume(int lane);
  bool run_wave(int wave);
  bool finish_wave_op(int wave);
  bool release_barrier();
  std::string lanes_in(LaneState state, bool others) const;
  bool lds_access(uintptr_t address, size_t bytes, bool is_write);
  void race(uint64_t other, const std::string &access);
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

inline thread_local Worker *Worker::current = nullptr;

inline void Worker::entry() {
  Worker &w = *current;
  w.invoke_(w.kernel_, w.arguments_);
  w.lanes_[w.lane_].state = LaneState::kDone;
  w.yield();
  std::abort();
}

inline void Worker::resume(int lane) {
  lane_ = lane;
  in_lane_ = true;
  fiber_switch(scheduler_, lanes_[lane].fiber);
  in_lane_ = false;
}

inline void Worker::run(uint64_t workgroup) {
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
inline bool Worker::run_wave(int wave) {
  const int first = wave * kWaveLanes, last = std::min<int>(lanes_.size(), first + kWaveLanes);
  for (int i = first; i < last; ++i) {
    const int lane = lane_order_[i];
    if (lanes_[lane].state == LaneState::kReady) resume(lane);
    if (abandoned_) return false;
  }
  return finish_wave_op(wave);
}

inline bool Worker::finish_wave_op(int wave) {
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
  const int read_lane = request.control & (kWaveLanes - 1);
  if (request.op == WaveOp::kReadLane && !(active >> read_lane & 1)) {
    fault(kDivergence, "a lane read names lane " + std::to_string(read_lane) + ", which is not active");
    return abandoned_ = true, false;
  }
  for (int i = 0; i < count; ++i) {
    if (!(active >> i & 1)) continue;
    if (request.op == WaveOp::kReadFirstLane) requests[i]->result = request.value;
    if (request.op == WaveOp::kReadLane) requests[i]->result = requests[read_lane]->value;
    lanes_[first + i].state = LaneState::kReady;
  }
  return true;
}

// Every lane is blocked or done: lets a complete barrier go; true if lanes are ready again.
inline bool Worker::release_barrier() {
  size_t waiting = 0, done = 0;
  for (const Lane &lane : lanes_) {
    waiting += lane.state == LaneState::kAtBarrier;
    done += lane.state == LaneState::kDone;
  }
  if (waiting == 0) return false;
  if (waiting + (options().allow_inactive_lanes ? done : 0) != lanes_.size()) {
    lane_ = 0;
    fault(kDivergence, "a barrier is not reached by lanes " + lanes_in(LaneState::kAtBarrier, true));
    return false;
  }
  ++epoch_;
  for (Lane &lane : lanes_) {
    if (lane.state != LaneState::kAtBarrier) continue;
    lane.state = LaneState::kReady;
    lane.acquired = false;
  }
  return true;
}

// Such as "0-15, 64-255": the lanes in a state, or those in any other.
inline std::string Worker::lanes_in(LaneState state, bool others) const {
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

inline int Worker::wave_op(const WaveRequest &request) {
  Lane &lane = lanes_[lane_];
  lane.request = request;
  lane.state = LaneState::kAtWaveOp;
  yield();
  return lane.request.result;
}

inline void Worker::barrier() {
  Lane &lane = lanes_[lane_];
  if (lane.unreleased_write) fault(kMissingFence, "LDS was written and no release fence stands before the barrier");
  lane.unreleased_write = false;
  lane.state = LaneState::kAtBarrier;
  yield();
}

inline void Worker::fence(int order) {
  if (order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST) {
    lanes_[lane_].unreleased_write = false;
  }
  if (order == __ATOMIC_ACQUIRE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST) {
    lanes_[lane_].acquired = true;
  }
}

// Frames grow downward: past the stack of one lane lie those of its neighbours, which an abandoned workgroup never uses.
inline void Worker::enter_function(uintptr_t frame) {
  if (in_lane_ && !stacks_.holds(lane_, frame - Stacks::kReserve)) {
    abandon(kGlobalBounds, "a lane's stack of " + std::to_string(Stacks::kBytes) + " bytes overflows");
  }
}

inline void Worker::access(uintptr_t address, size_t bytes, bool is_write) {
  if (!in_lane_ || stacks_.holds(lane_, address)) return;
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
  if (racing != 0) race(racing, access_text(is_write, bytes) + " " + launch_.memory.place_of(address));
}

// True if the address is in the workgroup's LDS; faults there are found here.
inline bool Worker::lds_access(uintptr_t address, size_t bytes, bool is_write) {
  if (!lds_.contains(address, reinterpret_cast<uintptr_t>(kernel_))) return false;
  const size_t offset = lds_.offset(address);
  const auto text = [&] { return access_text(is_write, bytes) + " at LDS byte " + std::to_string(offset); };
  if (offset > lds_.bytes() || bytes > lds_.bytes() - offset) abandon(kLdsBounds, text() + " of " + std::to_string(lds_.bytes()));
  Lane &lane = lanes_[lane_];
  if (is_write) {
    lane.unreleased_write = true;
  } else {
    if (!lds_.written(offset, bytes, workgroup_)) fault(kUninitialisedLds, text() + " that nobody wrote");
    if (!lane.acquired) fault(kMissingFence, "LDS is read and no acquire fence stands after the barrier");
  }
  const uint64_t racing = lds_.note(offset, bytes, now(), is_write);
  if (racing != 0) race(racing, text());
  return true;
}

// One race a workgroup: the first, and not all that follow from it.
inline void Worker::race(uint64_t other, const std::string &access) {
  if (raced_) return;
  raced_ = true;
  const bool outside = Access::workgroup(other) != workgroup_;
  const bool many = Access::lane(other) == Access::kManyLanes;  // of kManyWorkgroups too
  const std::string whom = outside ? "workgroup" : "lane";
  const uint64_t which = outside ? Access::workgroup(other) : Access::lane(other);
  fault(kRace, access + " races with " + (many ? "several " + whom + "s" : whom + " " + std::to_string(which)));
}

inline void Worker::fault(FaultKind kind, const std::string &what) {
  launch_.report.add(kind, "workgroup " + std::to_string(workgroup_) + ", lane " + std::to_string(lane_) + ", after " +
                               std::to_string(epoch_) + " barriers: " + what);
}
