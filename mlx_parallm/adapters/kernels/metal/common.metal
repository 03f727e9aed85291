// What both kernels share. Stands ahead of the generated function; comments and indentation are
// stripped before compilation, as MLX hashes the whole text at every call.

typedef long Place;  // an index into stacked factors: more than 2^31 elements

// N neighbouring elements, read or written at once.
template <typename S, int N>
struct alignas(16) Chunk {
  S at[N];
};
