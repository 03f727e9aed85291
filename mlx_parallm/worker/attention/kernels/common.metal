// Declarations that all kernels share. They stand before the generated function. Comments and
// indentation are stripped before compilation, because MLX hashes the whole text at every call.

typedef long Place;  // an index into a pool: more than 2^31 elements

// LEAST is below any score, and finite, so that differences are finite too.
constant constexpr float LEAST = -1e30f;

// The score of an unseen key, or a lane's part of it: its weight is 0 even beside LEAST.
constant constexpr float UNSEEN = -2e30f;

// N neighbouring elements that are read or written at once.
template <typename S, int N>
struct alignas(sizeof(S) * N < 16 ? sizeof(S) * N : 16) Chunk {
  S at[N];
};

// Unpacks numbers from words, so that registers stay whole until 16-bit halves are needed.
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

// Unpacks numbers of BITS bits: how many steps each is above the least value.
template <int BITS, int N, int W>
inline void levels(thread float (&to)[N], thread const Chunk<unsigned, W>& from) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const unsigned word = from.at[i * BITS / 32];
    const unsigned bytes = BITS == 8 ? word : word >> i * BITS % 8 & 0x0f0f0f0fu;
    // 2^23 + level has the level in its last bits; a conversion would take four times as long.
#ifdef __CUDA_ARCH__
    const unsigned number = __byte_perm(bytes, 0x4b000000u, 0x7440 + i * BITS % 32 / 8);
#else
    const unsigned number = 0x4b000000u | (bytes >> i * BITS % 32 / 8 * 8 & 0xff);
#endif
    to[i] = as_type<float>(number) - 8388608.0f;
  }
}

// Returns the numbers: levels times the step, plus the least value.
template <int BITS, typename M, int N, int W>
inline void dequantise(
    thread float (&to)[N], thread const Chunk<unsigned, W>& from, thread const Chunk<M, 2>& scale) {
  levels<BITS>(to, from);
#pragma unroll
  for (int i = 0; i < N; i++) {
    to[i] = to[i] * float(scale.at[0]) + float(scale.at[1]);
  }
}
