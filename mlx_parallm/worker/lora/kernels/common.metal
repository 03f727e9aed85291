// What both kernels share. Stands ahead of the generated function; comments and indentation are
// stripped before compilation, as MLX hashes the whole text at every call.

typedef long Place;  // an index into stacked factors: more than 2^31 elements

// N neighbouring elements, read or written at once.
template <typename S, int N>
struct alignas(16) Chunk {
  S at[N];
};

// COUNT rows of N neighbouring factors each, as numbers.
template <int COUNT, int N, typename S>
inline void load_rows(thread float (&to)[COUNT][N], const device S* from, Place stride) {
  Chunk<S, N> pieces[COUNT];
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    pieces[j] = *(const device Chunk<S, N>*)(from + j * stride);
  }
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
#pragma unroll
    for (int k = 0; k < N; k++) {
      to[j][k] = float(pieces[j].at[k]);
    }
  }
}

// A thread's part of the products of ROWS neighbouring rows of x with RANKS first factors each:
// every `step` numbers N of them, from `from` on. Factors are loaded anew only where the adapter is
// another one. Rows of slot 0 are left out.
template <int ROWS, int N, int MOST, int RANKS, typename S>
inline void shrink_rows(
    thread float (&sums)[MOST][RANKS], thread const int (&slots)[MOST], const device S* x,
    const device S* factors, Place slot_stride, int depth, int from, int step) {
#pragma unroll 2
  for (int at = from; at < depth; at += step) {
    float weights[RANKS][N];
    int held = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      if (slots[i] != 0) {
        float numbers[1][N];
        load_rows(numbers, x + (Place)i * depth + at, 0);
        if (slots[i] != held) {
          held = slots[i];
          load_rows(weights, factors + held * slot_stride + at, depth);
        }
#pragma unroll
        for (int j = 0; j < RANKS; j++) {
#pragma unroll
          for (int k = 0; k < N; k++) {
            sums[i][j] += numbers[0][k] * weights[j][k];
          }
        }
      }
    }
  }
}

// Adds N neighbouring outputs of ROWS neighbouring rows: `low`, of which a row has `total`, times
// the second factors, RANKS at a time.
template <int ROWS, int RANKS, int MOST, int N, typename S>
inline void expand_rows(
    thread float (&sums)[MOST][N], thread const int (&slots)[MOST], const device float* low,
    int total, const device S* factors, int ranks, int width) {
#pragma unroll 2
  for (int from = 0; from < ranks; from += RANKS) {
    float weights[RANKS][N];
    int held = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      if (slots[i] != 0) {
        if (slots[i] != held) {
          held = slots[i];
          load_rows(weights, factors + ((Place)held * ranks + from) * width, width);
        }
#pragma unroll
        for (int j = 0; j < RANKS; j++) {
          const float share = low[(Place)i * total + from + j];
#pragma unroll
          for (int k = 0; k < N; k++) {
            sums[i][k] += share * weights[j][k];
          }
        }
      }
    }
  }
}
