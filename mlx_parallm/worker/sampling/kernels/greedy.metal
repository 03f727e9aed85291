// One threadgroup finds the largest logit of one row, the lowest token among equals. NaN is the
// largest, as in MLX's argmax.
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
      if (i < PIECES && !(number <= best) && best == best) {
        best = number;
        best_id = i * VEC + j;
      }
    }
  }
}

// 2. Find the best of the threadgroup. Keys order NaN, too.
unsigned key = order_nan(best, 0);
#pragma unroll
for (int far = 16; far > 0; far /= 2) {
  const unsigned their_key = simd_shuffle_xor(key, far);
  const int their_id = simd_shuffle_xor(best_id, far);
  if (their_key > key || (their_key == key && their_id < best_id)) {
    key = their_key;
    best_id = their_id;
  }
}
threadgroup unsigned warp_key[WARPS];
threadgroup int warp_id[WARPS];
if (lane == 0) {
  warp_key[warp] = key;
  warp_id[warp] = best_id;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index == 0) {
  for (int w = 1; w < WARPS; w++) {
    if (warp_key[w] > key || (warp_key[w] == key && warp_id[w] < best_id)) {
      key = warp_key[w];
      best_id = warp_id[w];
    }
  }
  tokens[row] = best_id;
}
