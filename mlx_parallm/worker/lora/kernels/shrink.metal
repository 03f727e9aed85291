// One threadgroup: RANKS numbers of a layer's low-rank input of a row, or of ROWS rows where there
// are MANY_ROWS. The layers read the same x, and their ranks lie one after the other in `low`. Rows
// of slot 0 have no adapter: nothing is written for them.
constexpr int WARPS = THREADS / 32;
const int thread_index = thread_index_in_threadgroup;
const int group = threadgroup_position_in_grid.x;
const int num_rows = x_shape[0];
const int depth = x_shape[2];
const int count = num_rows < MANY_ROWS ? 1 : ROWS;
int total = a0_shape[1];
#if OUTPUTS > 1
total += a1_shape[1];
#endif
#if OUTPUTS > 2
total += a2_shape[1];
#endif
const int parts = total / RANKS;
const int first = group / parts * count;
const int column = group % parts * RANKS;
const device T* factors = a0;
int rank = column;
int ranks = a0_shape[1];
#if OUTPUTS > 1
const bool is_later = rank >= ranks;
if (is_later) {
  rank -= ranks;
  factors = a1;
  ranks = a1_shape[1];
}
#endif
#if OUTPUTS > 2
if (is_later && rank >= ranks) {
  rank -= ranks;
  factors = a2;
  ranks = a2_shape[1];
}
#endif

// 1. Every thread its numbers of x.
int mine[ROWS];
#pragma unroll
for (int i = 0; i < ROWS; i++) {
  mine[i] = i < count && first + i < num_rows ? slots[first + i] : 0;
}
float sums[ROWS][RANKS] = {};
const device T* rows = x + (Place)first * depth;
const device T* from = factors + (Place)rank * depth;
const Place slot_stride = (Place)ranks * depth;
if (count == 1) {
  shrink_rows<1, VEC>(sums, mine, rows, from, slot_stride, depth, thread_index * VEC, THREADS * VEC);
} else {
  shrink_rows<ROWS, VEC>(sums, mine, rows, from, slot_stride, depth, thread_index * VEC, THREADS * VEC);
}

// 2. The sums of all threads.
threadgroup float warp_sums[WARPS][ROWS * RANKS];
#pragma unroll
for (int i = 0; i < ROWS; i++) {
  if (i < count) {
#pragma unroll
    for (int j = 0; j < RANKS; j++) {
      float sum = sums[i][j];
#pragma unroll
      for (int far = 16; far > 0; far /= 2) {
        sum += simd_shuffle_xor(sum, far);
      }
      if (thread_index % 32 == 0) {
        warp_sums[thread_index / 32][i * RANKS + j] = sum;
      }
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int row = first + thread_index / RANKS;
if (thread_index < count * RANKS && row < num_rows && slots[row] != 0) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    sum += warp_sums[w][thread_index];
  }
  low[(Place)row * total + column + thread_index % RANKS] = sum;
}
