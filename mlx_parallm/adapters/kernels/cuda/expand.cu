// One thread: VEC neighbouring outputs of a module for up to ROWS rows: what they were, and what
// the rows' adapters add. The outputs of the modules lie one after the other, as their ranks do in
// `low`; `plan` says where these end, and how many rows a thread takes. What was there before may
// be part of a larger array.
typedef Chunk<T, VEC> Piece;
const int num_rows = low_shape[0];
const int total = low_shape[1];
const int count = plan[3];
int pieces = b0_shape[2] / VEC;
#if OUTPUTS > 1
pieces += b1_shape[2] / VEC;
#endif
#if OUTPUTS > 2
pieces += b2_shape[2] / VEC;
#endif
const int thread_index = blockIdx.x * THREADS + threadIdx.x;
const int first = thread_index / pieces * count;
int at = thread_index % pieces * VEC;
const T* factors = b0;
const T* before = y0;
T* after = output0;
int width = b0_shape[2];
int ranks = b0_shape[1];
int rank = 0;
Place row_stride = y0_strides[0];
Place stride = y0_strides[2];
#if OUTPUTS > 1
const bool is_later = at >= width;
if (is_later) {
  at -= width;
  factors = b1;
  before = y1;
  after = output1;
  width = b1_shape[2];
  ranks = b1_shape[1];
  rank = plan[0];
  row_stride = y1_strides[0];
  stride = y1_strides[2];
}
#endif
#if OUTPUTS > 2
if (is_later && at >= width) {
  at -= width;
  factors = b2;
  before = y2;
  after = output2;
  width = b2_shape[2];
  ranks = b2_shape[1];
  rank = plan[1];
  row_stride = y2_strides[0];
  stride = y2_strides[2];
}
#endif

// 1. What was there.
float sums[ROWS][VEC] = {};
#pragma unroll
for (int i = 0; i < ROWS; i++) {
  if (i < count && first + i < num_rows) {
#pragma unroll
    for (int k = 0; k < VEC; k++) {
      sums[i][k] = float(before[(first + i) * row_stride + (at + k) * stride]);
    }
  }
}

// 2. RANKS ranks at a time. Factors are loaded anew only where the adapter is another one.
for (int from = 0; from < ranks; from += RANKS) {
  float weights[RANKS][VEC];
  int held = 0;
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int row = first + i;
    const int slot = i < count && row < num_rows ? slots[row] : 0;
    if (slot != 0) {
      if (slot != held) {
        held = slot;
        const T* mine = factors + ((Place)slot * ranks + from) * width + at;
#pragma unroll
        for (int j = 0; j < RANKS; j++) {
          const Piece piece = *(const Piece*)(mine + (Place)j * width);
#pragma unroll
          for (int k = 0; k < VEC; k++) {
            weights[j][k] = float(piece.at[k]);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < RANKS; j++) {
        const float share = low[(Place)row * total + rank + from + j];
#pragma unroll
        for (int k = 0; k < VEC; k++) {
          sums[i][k] += share * weights[j][k];
        }
      }
    }
  }
}
#pragma unroll
for (int i = 0; i < ROWS; i++) {
  if (i < count && first + i < num_rows) {
    Piece piece;
#pragma unroll
    for (int k = 0; k < VEC; k++) {
      piece.at[k] = T(sums[i][k]);
    }
    *(Piece*)(after + (Place)(first + i) * width + at) = piece;
  }
}
