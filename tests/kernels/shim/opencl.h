// The Metal Shading Language as C++ for OpenCL, which clang checks: address spaces, types, templates.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long int64_t;
typedef ulong uint64_t;

// `constant` is a word of OpenCL too.
#define device __global
#define thread __private
#define threadgroup __local

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);
int lanes_xor(int value, ushort far);
unsigned lanes_xor(unsigned value, ushort far);
float lanes_xor(float value, ushort far);
#define simd_shuffle_xor lanes_xor

template <typename To, typename From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type changes no size");
  return __builtin_bit_cast(To, from);
}

typedef half float16_t;
struct bfloat16_t {
  ushort bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) : bits(as_type<unsigned>(value) >> 16) {}
  operator float() const { return as_type<float>((unsigned)bits << 16); }
  operator float() const __global { return as_type<float>((unsigned)bits << 16); }
  operator float() const __constant { return as_type<float>((unsigned)bits << 16); }
  operator float() const __local { return as_type<float>((unsigned)bits << 16); }
};

float exp2(float x);
float fmax(float x, float y);
float fmin(float x, float y);
float rint(float x);
float rsqrt(float x);
template <typename N>
N min(N x, N y) {
  return x < y ? x : y;
}
template <typename N>
N max(N x, N y) {
  return x > y ? x : y;
}
namespace precise {
float tanh(float x);
float log(float x);
float cos(float x);
float sin(float x);
}  // namespace precise
