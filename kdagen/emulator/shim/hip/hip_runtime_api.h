// Stands in for HIP's header when a generated kernel is compiled for the emulator; the real names, nothing more.
#pragma once

#include "../kdaemu.h"

#define __global__
#define __device__
#define __host__
// One object per kernel and thread of the host. The alignment keeps objects apart, so that an access past the end of one
// never reaches the next (see Worker::lds_access in worker.h). `used`: else clang drops stores that nobody reads.
#define __shared__ static thread_local __attribute__((aligned(65536), used))
// clang refuses a kernel's attributes on a function of the host.
#define amdgpu_flat_work_group_size(...) unused
#define amdgpu_waves_per_eu(...) unused

typedef int hipError_t;
typedef void *hipStream_t;
constexpr hipError_t hipSuccess = 0;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

extern "C" void kdaemu_invoke(const void *kernel, void **arguments);

static inline hipError_t hipLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t,
                                         hipStream_t) {
  return kdaemu_launch(kernel, kdaemu_invoke, grid.x * static_cast<unsigned long long>(grid.y) * grid.z,
                       block.x * block.y * block.z, arguments);
}
