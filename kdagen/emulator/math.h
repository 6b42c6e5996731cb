// The hardware's approximate functions, correct to a stated number of ulps and deliberately no better.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime.h"

inline uint32_t bits_of(float a) {
  uint32_t u;
  std::memcpy(&u, &a, sizeof u);
  return u;
}

inline float flushed(float a) { return std::fpclassify(a) == FP_SUBNORMAL ? std::copysign(0.0f, a) : a; }

// A number in [-1, 1] that depends on the input's bits, the function and the seed alone.
inline double offset_of(uint32_t bits, uint32_t function, uint64_t seed) {
  uint64_t h = seed * 0x9e3779b97f4a7c15u + (static_cast<uint64_t>(function) << 32 | bits);
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
  h = (h ^ h >> 27) * 0x94d049bb133111ebu;
  h ^= h >> 31;
  return static_cast<double>(h >> 11) * 0x1p-52 - 1.0;
}

// `exact` rounded to fp32 after being moved by at most `ulps` - 1/2 units of its last place, so within `ulps` in all.
inline float approximate(double exact, float input, uint32_t function, const KdaemuOptions &options) {
  const float nearest = static_cast<float>(exact);
  if (options.math == kExact || !std::isfinite(nearest) || nearest == 0.0f) return nearest;
  const double reach = options.math_ulps > 0.5f ? options.math_ulps - 0.5 : 0.0;
  const double direction = options.math == kLow    ? -1.0
                           : options.math == kHigh ? 1.0
                                                   : offset_of(bits_of(input), function, options.math_seed);
  int exponent;
  std::frexp(nearest, &exponent);
  return flushed(static_cast<float>(exact + direction * reach * std::ldexp(1.0, exponent - 24)));
}
