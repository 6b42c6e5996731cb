// The memory of a launch: declared intervals of global memory, and the LDS of a workgroup.
#pragma once

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "runtime.h"
#include "shadow.h"

// One declared interval, with shadow cells if it may be written.
class Interval {
 public:
  explicit Interval(const KdaemuInterval &declared) : declared_(declared) {}

  // All accesses so far are ordered before all that follow. Zero pages: a host thread makes those it touches real.
  void forget() {
    if (!writable()) return;
    const size_t count = (end() - begin()) / declared_.granule + 1;
    cells_.reset(static_cast<Cell *>(std::calloc(count, sizeof(Cell))));
    if (cells_ == nullptr) throw std::bad_alloc();
  }

  uint64_t begin() const { return declared_.begin; }
  uint64_t end() const { return declared_.end; }
  bool writable() const { return declared_.writable; }
  const char *name() const { return declared_.name; }

  uint64_t note(uintptr_t address, size_t bytes, uint64_t now, bool is_write) const {
    const uint64_t first = (address - declared_.begin) / declared_.granule;
    const uint64_t last = (address + bytes - 1 - declared_.begin) / declared_.granule;
    uint64_t racing = 0;
    for (uint64_t i = first; i <= last; ++i) {
      const uint64_t other = note_access(cells_[i], now, is_write);
      if (other != 0) racing = other;
    }
    return racing;
  }

 private:
  KdaemuInterval declared_;
  struct Free {
    void operator()(Cell *cells) const { std::free(cells); }
  };
  std::unique_ptr<Cell[], Free> cells_;
};

class Memory {
 public:
  Memory(const KdaemuInterval *intervals, int64_t count) : intervals_(intervals, intervals + count) {}

  // Launches of one stream run one after the other.
  void start_launch() {
    for (Interval &interval : intervals_) interval.forget();
  }

  // The interval that holds all of the access, or null.
  const Interval *find(uintptr_t address, size_t bytes) const {
    static thread_local size_t last = 0;
    if (last < intervals_.size() && holds(intervals_[last], address, bytes)) return &intervals_[last];
    const size_t i = index_after(address);
    if (i == 0 || !holds(intervals_[i - 1], address, bytes)) return nullptr;
    last = i - 1;
    return &intervals_[last];
  }

  // Where an address is, in words.
  std::string place_of(uintptr_t address) const {
    const size_t i = index_after(address);
    if (i > 0 && address < intervals_[i - 1].end()) {
      return "at byte " + std::to_string(address - intervals_[i - 1].begin()) + " of " + intervals_[i - 1].name();
    }
    std::string text = "outside every declared tensor row and live slot";
    if (i > 0) {
      text += ", " + std::to_string(address - intervals_[i - 1].end()) + " bytes past " + intervals_[i - 1].name();
    }
    if (i < intervals_.size()) {
      text += ", " + std::to_string(intervals_[i].begin() - address) + " before " + intervals_[i].name();
    }
    return text;
  }

 private:
  static bool holds(const Interval &interval, uintptr_t address, size_t bytes) {
    return address >= interval.begin() && address <= interval.end() && bytes <= interval.end() - address;
  }
  size_t index_after(uintptr_t address) const {
    return std::upper_bound(intervals_.begin(), intervals_.end(), address,
                            [](uintptr_t a, const Interval &interval) { return a < interval.begin(); }) -
           intervals_.begin();
  }

  std::vector<Interval> intervals_;
};

// The LDS of the running workgroup: a thread-local object of the kernel module, aligned to kAlignment.
class Lds {
 public:
  static constexpr size_t kAlignment = 65536;

  explicit Lds(size_t bytes) : bytes_(bytes), cells_(new Cell[bytes + 1]) {}

  void start() { poisoned_ = false; }
  size_t bytes() const { return bytes_; }
  size_t offset(uintptr_t address) const { return address % kAlignment; }

  // Whether the address is in the thread-local block of the module that holds `kernel`; finds that block when first asked.
  bool contains(uintptr_t address, uintptr_t kernel) {
    if (begin_ == 0) locate(kernel);
    if (address - begin_ >= size_) return false;
    if (!poisoned_) {
      std::memset(reinterpret_cast<void *>(address - offset(address)), 0xff, bytes_);
      poisoned_ = true;
    }
    return true;
  }
  bool module_holds(uintptr_t address) const { return address - module_begin_ < module_end_ - module_begin_; }

  bool written(size_t offset, size_t bytes, uint64_t workgroup) const {
    for (size_t i = 0; i < bytes; ++i) {
      const uint64_t writer = cells_[offset + i].write.load(std::memory_order_relaxed);
      if (writer == 0 || Access::workgroup(writer) != workgroup) return false;
    }
    return true;
  }

  uint64_t note(size_t offset, size_t bytes, uint64_t now, bool is_write) {
    uint64_t racing = 0;
    for (size_t i = 0; i < bytes; ++i) {
      Cell &cell = cells_[offset + i];
      // What another workgroup left behind is no access to this workgroup's LDS.
      if (cell.write.load(std::memory_order_relaxed) >> 24 != now >> 24) cell.write.store(0, std::memory_order_relaxed);
      if (cell.read.load(std::memory_order_relaxed) >> 24 != now >> 24) cell.read.store(0, std::memory_order_relaxed);
      const uint64_t other = note_access(cell, now, is_write);
      if (other != 0) racing = other;
    }
    return racing;
  }

 private:
  struct Search {
    uintptr_t kernel;
    Lds *lds;
  };

  void locate(uintptr_t kernel) {
    Search search = {kernel, this};
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *data) {
          const Search &search = *static_cast<Search *>(data);
          uintptr_t begin = UINTPTR_MAX, end = 0, tls = 0;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const ElfW(Phdr) &header = info->dlpi_phdr[i];
            if (header.p_type == PT_LOAD) {
              begin = std::min<uintptr_t>(begin, info->dlpi_addr + header.p_vaddr);
              end = std::max<uintptr_t>(end, info->dlpi_addr + header.p_vaddr + header.p_memsz);
            }
            if (header.p_type == PT_TLS) tls = header.p_memsz;
          }
          if (search.kernel < begin || search.kernel >= end) return 0;
          search.lds->module_begin_ = begin;
          search.lds->module_end_ = end;
          search.lds->begin_ = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
          search.lds->size_ = info->dlpi_tls_data != nullptr ? (tls + kAlignment - 1) / kAlignment * kAlignment : 0;
          return 1;
        },
        &search);
  }

  size_t bytes_;
  std::unique_ptr<Cell[]> cells_;
  bool poisoned_ = false;
  uintptr_t begin_ = 0, module_begin_ = 0, module_end_ = 0;
  size_t size_ = 0;
};
