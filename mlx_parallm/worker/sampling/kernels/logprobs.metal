// One threadgroup computes the log-probabilities of one row: of its token and of the likeliest
// ones. `wanted` has the row's index and how many are wanted. A thread keeps the best of its own
// logits; the best of all is written, and the thread that had it finds its next.
typedef Chunk<T, VEC> Piece;
constexpr int WARPS = THREADS / 32;
constexpr int NOBODY = 0x7fffffff;
const int thread_index = thread_index_in_threadgroup;
const int lane = thread_index % 32;
const int warp = thread_index / 32;
const int index = threadgroup_position_in_grid.x;
const int row = wanted[index * 2];
const int top = wanted[index * 2 + 1];
const auto mine = logits + (Place)row * V;
threadgroup unsigned warp_key[2][WARPS];
threadgroup int warp_id[2][WARPS];
threadgroup float warp_sum[WARPS];
unsigned my_key = 0;
int my_id = NOBODY;
unsigned key = 0xffffffffu;
int id = NOBODY;
float norm = 0.0f;
for (int nth = 0; nth < max(top, 1); nth++) {
  // 1. Find the thread's best after the last one written: less, or equal with a larger id.
  if (id == my_id) {
    const unsigned last_key = key;
    const int last_id = nth == 0 ? -1 : id;
    my_key = 0;
    my_id = NOBODY;
    for (int i = thread_index; i < V / VEC; i += THREADS) {
      const Piece piece = *((const device Piece*)mine + i);
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        const unsigned one = order(float(piece.at[j]), DROP);
        const int at = i * VEC + j;
        const bool is_left = one < last_key || (one == last_key && at > last_id);
        if (is_left && (one > my_key || my_id == NOBODY)) {
          my_key = one;
          my_id = at;
        }
      }
    }
  }

  // 2. Find the best of the threadgroup, the lowest id among equals.
  key = my_key;
  id = my_id;
#pragma unroll
  for (int far = 16; far > 0; far /= 2) {
    const unsigned their_key = simd_shuffle_xor(key, far);
    const int their_id = simd_shuffle_xor(id, far);
    if (their_key > key || (their_key == key && their_id < id)) {
      key = their_key;
      id = their_id;
    }
  }
  const int half_now = nth % 2;
  if (lane == 0) {
    warp_key[half_now][warp] = key;
    warp_id[half_now][warp] = id;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int w = 0; w < WARPS; w++) {
    const unsigned their_key = warp_key[half_now][w];
    const int their_id = warp_id[half_now][w];
    if (their_key > key || (their_key == key && their_id < id)) {
      key = their_key;
      id = their_id;
    }
  }

  // 3. Once the largest is known, compute the logarithm of the sum of exponentials.
  if (nth == 0) {
    const float largest = float(mine[id]);
    float sum = 0.0f;
    for (int i = thread_index; i < V / VEC; i += THREADS) {
      const Piece piece = *((const device Piece*)mine + i);
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        sum += exp2((float(piece.at[j]) - largest) * LOG2_E);
      }
    }
#pragma unroll
    for (int far = 16; far > 0; far /= 2) {
      sum += simd_shuffle_xor(sum, far);
    }
    if (lane == 0) {
      warp_sum[warp] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (int w = 0; w < WARPS; w++) {
      total += warp_sum[w];
    }
    norm = largest + precise::log(total);
  }
  if (thread_index == 0 && nth < top) {
    top_ids[(Place)index * top + nth] = id;
    top_values[(Place)index * top + nth] = float(mine[id]) - norm;
  }
}
if (thread_index == 0) {
  target_ids[index] = tokens[row];
  targets[index] = float(mine[tokens[row]]) - norm;
}
