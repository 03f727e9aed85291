// One thread: VEC neighbouring outputs of a layer for a row, or for ROWS rows where there are
// MANY_ROWS: what they were, and what the rows' adapters add. The outputs of the layers lie one
// after the other, as their ranks do in `low`. What was there before are neighbouring columns of a
// matrix, from `firsts` on.
typedef Chunk<T, VEC> Piece;
const int num_rows = low_shape[0];
const int total = low_shape[1];
const int count = num_rows < MANY_ROWS ? 1 : ROWS;
int pieces = b0_shape[2] / VEC;
#if OUTPUTS > 1
pieces += b1_shape[2] / VEC;
#endif
#if OUTPUTS > 2
pieces += b2_shape[2] / VEC;
#endif
const int thread_index = thread_position_in_grid.x;
const int first = thread_index / pieces * count;
int at = thread_index % pieces * VEC;
const device T* factors = b0;
const device T* before = y0;
device T* after = output0;
int width = b0_shape[2];
int ranks = b0_shape[1];
int rank = 0;
int columns = y0_shape[2];
before += firsts[0];
#if OUTPUTS > 1
const bool is_later = at >= width;
if (is_later) {
  at -= width;
  rank += ranks;
  factors = b1;
  before = y1 + firsts[1];
  after = output1;
  width = b1_shape[2];
  ranks = b1_shape[1];
  columns = y1_shape[2];
}
#endif
#if OUTPUTS > 2
if (is_later && at >= width) {
  at -= width;
  rank += ranks;
  factors = b2;
  before = y2 + firsts[2];
  after = output2;
  width = b2_shape[2];
  ranks = b2_shape[1];
  columns = y2_shape[2];
}
#endif
int mine[ROWS];
float sums[ROWS][VEC] = {};
#pragma unroll
for (int i = 0; i < ROWS; i++) {
  const int row = first + i;
  mine[i] = 0;
  if (i < count && row < num_rows) {
    mine[i] = slots[row];
#pragma unroll
    for (int k = 0; k < VEC; k++) {
      sums[i][k] = float(before[(Place)row * columns + at + k]);
    }
  }
}
const device float* shares = low + (Place)first * total + rank;
if (count == 1) {
  expand_rows<1, RANKS>(sums, mine, shares, total, factors + at, ranks, width);
} else {
  expand_rows<ROWS, RANKS>(sums, mine, shares, total, factors + at, ranks, width);
}
#pragma unroll
for (int i = 0; i < ROWS; i++) {
  if (i < count && first + i < num_rows) {
    Piece piece;
#pragma unroll
    for (int k = 0; k < VEC; k++) {
      piece.at[k] = T(sums[i][k]);
    }
    *(device Piece*)(after + (Place)(first + i) * width + at) = piece;
  }
}
