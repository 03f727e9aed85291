// Declarations that all kernels share. They stand before the generated function. Comments and
// indentation are stripped before compilation, because MLX hashes the whole text at every call.

typedef long long Place;  // an index into a pool: more than 2^31 elements

// LEAST is below any score, and finite, so that differences are finite too.
constexpr float LEAST = -1e30f;

// The score of an unseen key, or a lane's part of it: its weight is 0 even beside LEAST.
constexpr float UNSEEN = -2e30f;

// N neighbouring elements that are read or written at once.
template <typename S, int N>
struct alignas(sizeof(S) * N < 16 ? sizeof(S) * N : 16) Chunk {
  S at[N];
};

// Unpacks numbers from words, so that registers stay whole until 16-bit halves are needed.
template <int N>
inline void widen(float (&to)[N], const Chunk<unsigned, N>& from, float) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    to[i] = __uint_as_float(from.at[i]);
  }
}

template <int N>
inline void widen(float (&to)[N], const Chunk<unsigned, N / 2>& from, __nv_bfloat16) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const unsigned word = from.at[i / 2];
    to[i] = __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
  }
}

template <int N>
inline void widen(float (&to)[N], const Chunk<unsigned, N / 2>& from, __half) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    to[i] = float(__ushort_as_half((unsigned short)(from.at[i / 2] >> i % 2 * 16)));
  }
}

// Unpacks numbers of BITS bits: how many steps each is above the least value.
template <int BITS, int N, int W>
inline void levels(float (&to)[N], const Chunk<unsigned, W>& from) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const unsigned word = from.at[i * BITS / 32];
    const unsigned bytes = BITS == 8 ? word : word >> i * BITS % 8 & 0x0f0f0f0fu;
    // 2^23 + level has the level in its last bits; a conversion would take four times as long.
    const unsigned number = __byte_perm(bytes, 0x4b000000u, 0x7440 + i * BITS % 32 / 8);
    to[i] = __uint_as_float(number) - 8388608.0f;
  }
}

// Returns the numbers: levels times the step, plus the least value.
template <int BITS, typename M, int N, int W>
inline void dequantise(
    float (&to)[N], const Chunk<unsigned, W>& from, const Chunk<M, 2>& scale) {
  levels<BITS>(to, from);
#pragma unroll
  for (int i = 0; i < N; i++) {
    to[i] = to[i] * float(scale.at[0]) + float(scale.at[1]);
  }
}
