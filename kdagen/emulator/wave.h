// What a wave does together: DPP and lane reads, on the values that its lanes brought.
#pragma once

#include <cstdint>

constexpr int kWaveLanes = 64;
constexpr int kRowLanes = 16;

enum class WaveOp : int32_t { kNone, kDpp, kReadLane, kReadFirstLane };

// What one lane asks for; lanes of a wave must agree in everything but the values.
struct WaveRequest {
  WaveOp op = WaveOp::kNone;
  int control = 0, row_mask = 0, bank_mask = 0;
  bool bound_ctrl = false;
  int value = 0, old = 0;
  int result = 0;

  bool agrees_with(const WaveRequest &other) const {
    return op == other.op && control == other.control && row_mask == other.row_mask && bank_mask == other.bank_mask &&
           bound_ctrl == other.bound_ctrl;
  }
};

constexpr int kOutside = -1, kUnknown = -2;

// The lane that `lane` reads under a DPP control of GFX9 and gfx90a: kOutside beyond its row or wave.
inline int dpp_source(int control, int lane) {
  const int within = lane % kRowLanes, row = lane - within, n = control & 0xf;
  if (control >= 0 && control <= 0xff) return lane - lane % 4 + (control >> 2 * (lane % 4) & 3);
  if (control >= 0x101 && control <= 0x10f) return within + n < kRowLanes ? lane + n : kOutside;
  if (control >= 0x111 && control <= 0x11f) return within >= n ? lane - n : kOutside;
  if (control >= 0x121 && control <= 0x12f) return row + (within - n + kRowLanes) % kRowLanes;
  if (control >= 0x150 && control <= 0x15f) return row + n;
  switch (control) {
    case 0x130: return lane + 1 < kWaveLanes ? lane + 1 : kOutside;      // wave_shl:1
    case 0x134: return (lane + 1) % kWaveLanes;                           // wave_rol:1
    case 0x138: return lane ? lane - 1 : kOutside;                        // wave_shr:1
    case 0x13c: return (lane + kWaveLanes - 1) % kWaveLanes;              // wave_ror:1
    case 0x140: return row + kRowLanes - 1 - within;                      // row_mirror
    case 0x141: return lane - lane % 8 + 7 - lane % 8;                    // row_half_mirror
    case 0x142: return row ? row - 1 : kOutside;                          // row_bcast:15
    case 0x143: return lane >= 32 ? 31 : kOutside;                        // row_bcast:31
    default: return kUnknown;
  }
}

// A disabled source lane counts as outside: bound_ctrl then gives 0, else the lane keeps its old value.
inline void run_dpp(WaveRequest *const *requests, uint64_t active) {
  for (int lane = 0; lane < kWaveLanes; ++lane) {
    if (!(active >> lane & 1)) continue;
    WaveRequest &r = *requests[lane];
    const bool enabled = (r.row_mask >> lane / kRowLanes & 1) && (r.bank_mask >> lane % kRowLanes / 4 & 1);
    const int source = dpp_source(r.control, lane);
    const bool valid = source >= 0 && (active >> source & 1);
    r.result = !enabled ? r.old : valid ? requests[source]->value : r.bound_ctrl ? 0 : r.old;
  }
}
