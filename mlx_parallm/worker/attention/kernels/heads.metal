// One warp makes some heads of one row: queries, and keys or values of the pool. The inputs are the
// layer's products; each begins at a column of its own, as several layers may be one product.
// Roundings are those of MLX's operations: the norm, its weight, and the rotation each round once.
// The pools are inputs that are written in place. Every reader depends on `token`.
constexpr int HALF = D / 2;
constexpr int EACH = HALF / 32;  // numbers that a lane has in each half of a head
constexpr int ALL_HEADS = HEADS + 2 * KV_HEADS;
const int thread_index = thread_index_in_threadgroup;
const int lane = thread_index % 32;
const int index = threadgroup_position_in_grid.x * WARPS + thread_index / 32;
// With many rows, a warp makes several heads, which are rotated by the same angles.
const int count = max(1, min(MOST_HEADS, slots_shape[0] * ALL_HEADS / AT_ONCE));
const int row = index / ((ALL_HEADS + count - 1) / count);
const int first_head = index % ((ALL_HEADS + count - 1) / count) * count;
const int first = lane * EACH;
if (index == 0 && lane == 0) {
  token[0] = previous[0] + 1;
}
if (row < slots_shape[0]) {
  const int slot = slots[row];
  const Place block = slot / BLOCK_SIZE;

  // 1. Find the angles by which a lane's numbers are rotated.
  const float position = SCALE * float(positions[row]);
  float cosine[EACH];
  float sine[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
#if FREQUENCIES
    const float angle = position * (1.0f / frequencies[first + i]);
#else
    const float angle = position * exp2(-(float(first + i) / float(HALF)) * LOG_BASE);
#endif
    cosine[i] = precise::cos(angle);
    sine[i] = precise::sin(angle);
  }

  for (int head = first_head; head < min(first_head + count, ALL_HEADS); head++) {
    // 2. Find the head, and the key's or value's place in its pool.
    const int kv_head = (head - HEADS) % KV_HEADS;
    const Place to = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * D;
    if (head >= HEADS + KV_HEADS) {
      if (slot >= 0) {
        const Place from = (Place)row * values_shape[2] + FIRST_VALUE + kv_head * D;
#pragma unroll
        for (int i = 0; i < 2 * EACH; i++) {
          const int at = lane * (2 * EACH) + i;
          ((device T*)value_pool)[to + at] = values[from + at];
        }
      }
    } else {
      const bool is_key = head >= HEADS;
      float low[EACH];
      float high[EACH];
      const Place query = (Place)row * queries_shape[2] + FIRST_QUERY + head * D;
      const Place key = (Place)row * keys_shape[2] + FIRST_KEY + kv_head * D;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        low[i] = float(is_key ? keys[key + first + i] : queries[query + first + i]);
        high[i] = float(is_key ? keys[key + HALF + first + i] : queries[query + HALF + first + i]);
      }

#if NORM
      // 3. Divide by the root of the mean square.
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        sum += low[i] * low[i] + high[i] * high[i];
      }
#pragma unroll
      for (int far = 1; far < 32; far *= 2) {
        sum += simd_shuffle_xor(sum, far);
      }
      const float norm = rsqrt(sum / D + EPSILON);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int at = first + i;
        const float low_weight = float(is_key ? key_weight[at] : query_weight[at]);
        const float high_weight = float(is_key ? key_weight[HALF + at] : query_weight[HALF + at]);
        low[i] = float(T(float(T(low[i] * norm)) * low_weight));
        high[i] = float(T(float(T(high[i] * norm)) * high_weight));
      }
#endif

      // 4. Rotate each number of the lower half with one of the upper half.
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const T lower = T(low[i] * cosine[i] - high[i] * sine[i]);
        const T upper = T(low[i] * sine[i] + high[i] * cosine[i]);
        if (!is_key) {
          const Place out = ((Place)row * HEADS + head) * D + first + i;
          rotated[out] = lower;
          rotated[out + HALF] = upper;
        } else if (slot >= 0) {
          ((device T*)key_pool)[to + first + i] = lower;
          ((device T*)key_pool)[to + HALF + first + i] = upper;
        }
      }
    }
  }
}
