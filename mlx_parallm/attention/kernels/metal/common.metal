// What all kernels share. Stands ahead of the generated function; comments and indentation are
// stripped before compilation, as MLX hashes the whole text at every call.

typedef long Place;  // an index into a pool: more than 2^31 elements

// Below any score; finite, so that differences are.
constant constexpr float LEAST = -1e30f;

// N neighbouring elements, read or written at once.
template <typename S, int N>
struct alignas(sizeof(S) * N < 16 ? sizeof(S) * N : 16) Chunk {
  S at[N];
};

template <typename S, int N>
inline void widen(thread float (&to)[N], thread const Chunk<S, N>& from) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    to[i] = float(from.at[i]);
  }
}
