// As much of the Metal Shading Language as the kernels use.
#pragma once

#include "lanes.h"
#include "numbers.h"

typedef unsigned uint;
typedef unsigned short ushort;
struct uint3 {
  uint x, y, z;
};
using float16_t = shim::Half;
using bfloat16_t = shim::Bfloat;

// Address spaces cannot be told apart here: shim_language.py checks them as text.
#define device
#define constant
#define thread
#define threadgroup SHIM_SHARED

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
#define threadgroup_barrier(flags) shim::metal_barrier(flags, __LINE__)
#define simdgroup_barrier(flags) shim::metal_warp_barrier(flags, __LINE__)
#define simd_shuffle_xor(value, far) shim::shuffle_xor(value, far, __LINE__)

namespace shim {
static void metal_barrier(mem_flags flags, int line) {
  if (flags != mem_flags::mem_threadgroup) failure = BAD_FLAGS;
  barrier(line);
}
static void metal_warp_barrier(mem_flags flags, int line) {
  if (flags != mem_flags::mem_threadgroup) failure = BAD_FLAGS;
  warp_barrier(line);
}
}  // namespace shim

template <typename To, typename From>
static inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type changes no size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

namespace precise {
static inline float tanh(float x) { return tanhf(x); }
static inline float log(float x) { return logf(x); }
static inline float cos(float x) { return cosf(x); }
static inline float sin(float x) { return sinf(x); }
}  // namespace precise
