// One threadgroup finds the largest logit of one row, the lowest token among equals.
typedef Chunk<T, VEC> Piece;
constexpr int WARPS = THREADS / 32;
constexpr int PIECES = V / VEC;
constexpr int AHEAD = 4;  // pieces that a thread loads before it looks at them
const int thread_index = thread_index_in_threadgroup;
const int lane = thread_index % 32;
const int warp = thread_index / 32;
const int row = threadgroup_position_in_grid.x;
const auto mine = (const device Piece*)(logits + (Place)row * V);

// 1. A thread's tokens have ascending ids.
float best = as_type<float>(0xff800000u);
int best_id = 0;
for (int first = thread_index; first < PIECES; first += AHEAD * THREADS) {
  Piece pieces[AHEAD];
#pragma unroll
  for (int a = 0; a < AHEAD; a++) {
    const int i = first + a * THREADS;
    pieces[a] = mine[i < PIECES ? i : first];
  }
#pragma unroll
  for (int a = 0; a < AHEAD; a++) {
    const int i = first + a * THREADS;
#pragma unroll
    for (int j = 0; j < VEC; j++) {
      const float number = float(pieces[a].at[j]);
      if (i < PIECES && number > best) {
        best = number;
        best_id = i * VEC + j;
      }
    }
  }
}

// 2. Find the best of the threadgroup.
#pragma unroll
for (int far = 16; far > 0; far /= 2) {
  const float their_best = simd_shuffle_xor(best, far);
  const int their_id = simd_shuffle_xor(best_id, far);
  if (their_best > best || (their_best == best && their_id < best_id)) {
    best = their_best;
    best_id = their_id;
  }
}
threadgroup float warp_best[WARPS];
threadgroup int warp_id[WARPS];
if (lane == 0) {
  warp_best[warp] = best;
  warp_id[warp] = best_id;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index == 0) {
  for (int w = 1; w < WARPS; w++) {
    if (warp_best[w] > best || (warp_best[w] == best && warp_id[w] < best_id)) {
      best = warp_best[w];
      best_id = warp_id[w];
    }
  }
  tokens[row] = best_id;
}
