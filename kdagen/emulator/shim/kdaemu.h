// The AMDGPU builtins of a generated kernel, mapped to the emulator's runtime.
#pragma once

#include <cstddef>

extern "C" {
typedef void (*kdaemu_invoke_fn)(const void *kernel, void **arguments);
int kdaemu_launch(const void *kernel, kdaemu_invoke_fn invoke, unsigned long long workgroups, unsigned threads,
                  void **arguments);
unsigned kdaemu_thread(void);
unsigned kdaemu_workgroup(void);
int kdaemu_update_dpp(int old, int source, int control, int row_mask, int bank_mask, bool bound_ctrl);
int kdaemu_readlane(int value, int lane);
int kdaemu_readfirstlane(int value);
void kdaemu_barrier(void);
void kdaemu_fence(int order);
float kdaemu_exp2(float a);
float kdaemu_log2(float a);
float kdaemu_rcp(float a);
float kdaemu_rsq(float a);
void *__tsan_memcpy(void *to, const void *from, size_t bytes);
void *__tsan_memmove(void *to, const void *from, size_t bytes);
void *__tsan_memset(void *to, int value, size_t bytes);
}

#define __builtin_amdgcn_workitem_id_x kdaemu_thread
#define __builtin_amdgcn_workgroup_id_x kdaemu_workgroup
#define __builtin_amdgcn_update_dpp kdaemu_update_dpp
#define __builtin_amdgcn_mov_dpp(a, control, rows, banks, bound) kdaemu_update_dpp(0, a, control, rows, banks, bound)
#define __builtin_amdgcn_readlane kdaemu_readlane
#define __builtin_amdgcn_readfirstlane kdaemu_readfirstlane
#define __builtin_amdgcn_s_barrier kdaemu_barrier
#define __builtin_amdgcn_fence(order, ...) kdaemu_fence(order)
#define __builtin_amdgcn_sched_barrier(mask) ((void)(mask))
#define __builtin_amdgcn_sched_group_barrier(mask, size, id) ((void)(mask))
#define __builtin_amdgcn_s_setprio(priority) ((void)(priority))
#define __builtin_amdgcn_wave_barrier() ((void)0)
#define __builtin_amdgcn_mbcnt_lo(mask, base) kdaemu_mbcnt(mask, base, 0)
#define __builtin_amdgcn_mbcnt_hi(mask, base) kdaemu_mbcnt(mask, base, 32)
#define __builtin_amdgcn_exp2f kdaemu_exp2
#define __builtin_amdgcn_logf kdaemu_log2
#define __builtin_amdgcn_rcpf kdaemu_rcp
#define __builtin_amdgcn_rsqf kdaemu_rsq
// Macros, so that the access happens in the kernel's own instrumented text.
#define __builtin_nontemporal_load(address) (*(address))
#define __builtin_nontemporal_store(value, address) ((void)(*(address) = (value)))
#define __builtin_memcpy __tsan_memcpy
#define __builtin_memmove __tsan_memmove
#define __builtin_memset __tsan_memset
#define __builtin_elementwise_fma kdaemu_fma

// `base` and the bits of `mask` that belong to lower lanes of the wave; bit 0 belongs to lane `first`.
static inline unsigned kdaemu_mbcnt(unsigned mask, unsigned base, unsigned first) {
  const unsigned lane = kdaemu_thread() % 64;
  const unsigned long long lower = lane <= first ? 0 : (1ull << (lane - first)) - 1;
  return base + __builtin_popcountll(mask & lower);
}

static inline float kdaemu_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class Vector>
static inline Vector kdaemu_fma(Vector a, Vector b, Vector c) {
  for (size_t i = 0; i < sizeof(Vector) / sizeof(float); ++i) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return a;
}

// bfloat16 with round-to-nearest-even from float; a NaN stays a NaN.
struct kdaemu_bf16 {
  unsigned short bits;
  explicit kdaemu_bf16(float a) {
    const unsigned u = __builtin_bit_cast(unsigned, a);
    bits = static_cast<unsigned short>(a != a ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
};
#define __bf16 kdaemu_bf16
