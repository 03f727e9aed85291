// Stands ahead of the generated function; comments and indentation are stripped before compilation,
// as MLX hashes the whole text at every call.

typedef long long Place;  // an index into a state: more than 2^31 elements

// N neighbouring elements, read or written at once.
template <typename S, int N>
struct alignas(sizeof(S) * N) Chunk {
  S at[N];
};

constexpr float LOG2E = 1.4426950408889634f;
