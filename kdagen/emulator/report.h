// Collects a launch's faults from all host threads.
#pragma once

#include <cstdio>
#include <mutex>
#include <string>

#include "runtime.h"

class Report {
 public:
  explicit Report(KdaemuReport &report) : report_(report) {}

  void count_workgroups(uint64_t workgroups) { report_.workgroups += workgroups; }

  // Faults of one kind share an entry: the first message and a count.
  void add(FaultKind kind, const std::string &message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int i = 0; i < report_.faults; ++i) {
      if (report_.fault[i].kind == kind) {
        ++report_.fault[i].count;
        return;
      }
    }
    KdaemuFault &fault = report_.fault[report_.faults++];
    fault.kind = kind;
    fault.count = 1;
    std::snprintf(fault.message, kMessageBytes, "%s", message.c_str());
  }

 private:
  KdaemuReport &report_;
  std::mutex mutex_;
};

inline std::string access_text(bool is_write, size_t bytes) {
  return std::string(is_write ? "a write" : "a read") + " of " + std::to_string(bytes) + " bytes";
}
