// Shadow memory: who wrote and who read each element last, which is all that finding a data race takes.
#pragma once

#include <atomic>
#include <cstdint>

// One access: workgroup, barrier epoch inside it, lane. 0 is nobody.
struct Access {
  static constexpr uint64_t kManyLanes = 0xfff;
  static constexpr uint64_t kManyWorkgroups = ~uint64_t{0};

  static uint64_t pack(uint64_t workgroup, uint64_t epoch, uint64_t lane) {
    return (workgroup + 1) << 24 | (epoch & 0xfff) << 12 | lane;
  }
  static uint64_t workgroup(uint64_t access) { return (access >> 24) - 1; }
  static uint64_t epoch(uint64_t access) { return access >> 12 & 0xfff; }
  static uint64_t lane(uint64_t access) { return access & 0xfff; }
};

struct Cell {
  std::atomic<uint64_t> write{0}, read{0};
};

// Two accesses are ordered if one lane made both, or a barrier of their workgroup lies between them.
inline bool ordered(uint64_t before, uint64_t now) {
  if (before == 0) return true;
  if (before == Access::kManyWorkgroups || before >> 24 != now >> 24) return false;
  return Access::epoch(before) != Access::epoch(now) || Access::lane(before) == Access::lane(now);
}

// The readers to remember once `now` has read too: those of the last epoch, or all workgroups.
inline uint64_t readers_with(uint64_t reader, uint64_t now) {
  if (reader == 0 || reader == now) return now;
  if (reader >> 24 != now >> 24) return Access::kManyWorkgroups;
  return reader >> 12 == now >> 12 ? now | Access::kManyLanes : now;
}

// Notes an access; returns the earlier one that it races with, or 0. Each side publishes itself before it looks at the
// other, so that of two racing host threads at least one sees the race.
inline uint64_t note_access(Cell &cell, uint64_t now, bool is_write) {
  if (is_write) {
    const uint64_t writer = cell.write.exchange(now);
    const uint64_t reader = cell.read.load();
    return !ordered(writer, now) ? writer : !ordered(reader, now) ? reader : 0;
  }
  uint64_t reader = cell.read.load();
  while (reader != readers_with(reader, now) && !cell.read.compare_exchange_weak(reader, readers_with(reader, now))) {
  }
  const uint64_t writer = cell.write.load();
  return ordered(writer, now) ? 0 : writer;
}
