// As much of CUDA C++ as the kernels use.
#pragma once

#include "lanes.h"
#include "numbers.h"

using __half = shim::Half;
using __nv_bfloat16 = shim::Bfloat;

static inline float __uint_as_float(unsigned bits) { return shim::float_of(bits); }
static inline unsigned __float_as_uint(float value) { return shim::bits_of(value); }
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned chosen = 0;
  for (int i = 0; i < 4; i++) {
    chosen |= (unsigned)(both >> (selector >> i * 4 & 7) * 8 & 0xff) << i * 8;
  }
  return chosen;
}
static inline __half __ushort_as_half(unsigned short bits) {
  __half value;
  value.bits = bits;
  return value;
}

// Texts ask for it where CUDA has a faster instruction.
#define __CUDA_ARCH__ 900

#define __shared__ SHIM_SHARED
#define __syncthreads() shim::barrier(__LINE__)
#define __syncwarp() shim::warp_barrier(__LINE__)
#define __shfl_xor_sync(mask, value, far) shim::shuffle_xor(value, far, __LINE__ + 0 * (mask))

struct uint3 {
  unsigned x, y, z;
};
static uint3 blockIdx, gridDim;
// Read through the fiber that runs: it changes whenever another goes on.
struct ThreadIndex {
  struct X {
    operator unsigned() const { return shim::current; }
  } x;
};
static ThreadIndex threadIdx;

// As MLX passes shapes and strides.
template <typename I>
struct Sizes {
  I at[10];
  I operator[](int i) const { return at[i]; }
};
using Shape = Sizes<int32_t>;
using Strides = Sizes<int64_t>;
