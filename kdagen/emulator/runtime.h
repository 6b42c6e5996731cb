// What the Python side and the runtime share: intervals of memory, options, faults, the report.
#pragma once

#include <cstdint>

enum FaultKind : int32_t {  // in the order of kdagen.emulator.FaultKind
  kRace,
  kUninitialisedLds,
  kLdsBounds,
  kGlobalBounds,
  kReadOnly,
  kDivergence,
  kNotUniform,
  kMissingFence,
  kBadDpp,
  kFaultKinds,
};

struct KdaemuInterval {
  uint64_t begin, end;  // addresses, end exclusive
  int32_t writable;
  int32_t granule;  // bytes of one element, the unit in which races are found
  const char *name;
};

enum MathMode : int32_t { kExact, kLow, kHigh, kRandom };

struct KdaemuOptions {
  int32_t math;  // MathMode
  int32_t threads;
  float math_ulps;
  int32_t allow_inactive_lanes;
  uint64_t math_seed;
  int64_t lane_order_seed;  // below 0: natural order
  int64_t lds_bytes;
};

constexpr int kMessageBytes = 320;

struct KdaemuFault {
  int32_t kind;
  int64_t count;
  char message[kMessageBytes];
};

struct KdaemuReport {
  int64_t workgroups;
  int32_t faults;
  KdaemuFault fault[kFaultKinds];  // the first of each kind
};
