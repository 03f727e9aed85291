// The words of the Metal Shading Language in CUDA C++, so that one text is both. They stand before
// everything else. Comments and indentation are stripped before compilation.
#define device
#define constant
#define thread
#define threadgroup __shared__

#define thread_index_in_threadgroup threadIdx.x
#define threadgroup_position_in_grid blockIdx
#define thread_position_in_grid (uint3{blockIdx.x * THREADS + threadIdx.x, 0, 0})

// Both barriers order all memory of a block, whichever flags Metal needs.
#define threadgroup_barrier(flags) __syncthreads()
#define simdgroup_barrier(flags) __syncwarp()
#define simd_shuffle_xor(value, far) __shfl_xor_sync(0xffffffff, value, far)

typedef __half float16_t;
typedef __nv_bfloat16 bfloat16_t;

// A reinterpretation that is not listed here does not compile.
template <typename To, typename From>
To as_type(From from) = delete;
template <>
inline float as_type<float>(unsigned bits) {
  return __uint_as_float(bits);
}
template <>
inline unsigned as_type<unsigned>(float number) {
  return __float_as_uint(number);
}
template <>
inline float16_t as_type<float16_t>(unsigned short bits) {
  return __ushort_as_half(bits);
}

// Without fast math, CUDA's functions are as precise as these of Metal.
namespace precise {
inline float tanh(float x) {
  return tanhf(x);
}
inline float log(float x) {
  return logf(x);
}
inline float cos(float x) {
  return cosf(x);
}
inline float sin(float x) {
  return sinf(x);
}
}  // namespace precise
