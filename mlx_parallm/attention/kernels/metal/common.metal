// What all kernels share. Stands ahead of the generated function; comments and indentation are
// stripped before compilation, as MLX hashes the whole text at every call.

typedef long Place;  // an index into a pool: more than 2^31 elements

// Below any score; finite, so that differences are.
constant constexpr float LEAST = -1e30f;

// The score of a key that is not seen, or a lane's part of it: its weight is 0 even beside LEAST.
constant constexpr float UNSEEN = -2e30f;

// N neighbouring elements, read or written at once.
template <typename S, int N>
struct alignas(sizeof(S) * N < 16 ? sizeof(S) * N : 16) Chunk {
  S at[N];
};

// Numbers out of words: registers are not split into 16-bit halves before they must be.
template <int N>
inline void widen(thread float (&to)[N], thread const Chunk<unsigned, N>& from, float) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    to[i] = as_type<float>(from.at[i]);
  }
}

template <int N>
inline void widen(thread float (&to)[N], thread const Chunk<unsigned, N / 2>& from, bfloat16_t) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const unsigned word = from.at[i / 2];
    to[i] = as_type<float>(i % 2 ? word & 0xffff0000u : word << 16);
  }
}

template <int N>
inline void widen(thread float (&to)[N], thread const Chunk<unsigned, N / 2>& from, float16_t) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    to[i] = float(as_type<float16_t>((unsigned short)(from.at[i / 2] >> i % 2 * 16)));
  }
}

// The same of numbers of BITS bits, which stand for that many steps above the least.
template <int BITS, typename M, int N, int W>
inline void dequantise(
    thread float (&to)[N], thread const Chunk<unsigned, W>& from, thread const Chunk<M, 2>& scale) {
  const float step = float(scale.at[0]);
  const float least = float(scale.at[1]);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const unsigned level = from.at[i * BITS / 32] >> (i * BITS % 32) & ((1 << BITS) - 1);
    // 2^23 + level, whose last bit counts ones: a conversion takes four times as long.
    to[i] = (as_type<float>(0x4b000000u | level) - 8388608.0f) * step + least;
  }
}
