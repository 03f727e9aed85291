// One threadgroup: one item (a query row and a range of its keys), G query heads of one KV head.
// LANES lanes share a key, each VEC of its elements, so a warp takes KEYS keys at once and TILE a
// trip; the warps take tiles in turn. All lanes of a warp make the same number of trips.
const int thread_index = thread_index_in_threadgroup;
const int lane = thread_index % 32;
const int warp = thread_index / 32;
const int at = lane % LANES * VEC;
const int which = lane / LANES;
typedef Chunk<T, VEC> Piece;
#if BITS
typedef Chunk<unsigned, VEC * BITS / 32> Stored;
typedef Chunk<M, 2> Scale;
constexpr int PACKED = 32 / BITS;
constexpr int KEY_GROUPS = (D + GROUP - 1) / GROUP;
constexpr int VALUE_GROUPS = (V + GROUP - 1) / GROUP;
#else
typedef Chunk<T, VEC> Stored;
constexpr int PACKED = 1;
#endif
const int index = threadgroup_position_in_grid.x;
const int item = index / (KV_HEADS * PARTS);
const int kv_head = index / PARTS % KV_HEADS;
const int head = kv_head * SHARE + index % PARTS * G;
const int num_heads = SHARE - index % PARTS * G;
const int row = items[item * 4];
const int table = items[item * 4 + 1] * tables_shape[1];
const int first = items[item * 4 + 2];
const int end = items[item * 4 + 3];

// 1. Queries, scaled so that scores are exponents of two (before the soft cap: its argument).
float query[G][VEC];
#pragma unroll
for (int g = 0; g < G; g++) {
  Piece raw = {};
  if (g < num_heads && at < D) {
    raw = *(const device Piece*)(queries + ((Place)row * HEADS + head + g) * D + at);
  }
  widen(query[g], raw);
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    query[g][i] *= QUERY_SCALE;
  }
}

// 2. A running softmax per head: its largest score, the weights' sum, the weighted values' sum.
float most[G];
float total[G];
float sums[G][VEC];
#pragma unroll
for (int g = 0; g < G; g++) {
  most[g] = LEAST;
  total[g] = 0.0f;
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    sums[g][i] = 0.0f;
  }
}

for (int tile = first / TILE * TILE + warp * TILE; tile < end; tile += WARPS * TILE) {
  // 3. Keys and values of a tile, which lies in one block. What is not seen is not read: it may
  // hold another sequence's infinities.
  const Place block = tables[table + tile / BLOCK_SIZE];
  const Place start = (block * KV_HEADS + kv_head) * BLOCK_SIZE + tile % BLOCK_SIZE + which;
  Stored raw_keys[UNROLL];
  Stored raw_values[UNROLL];
  bool seen[UNROLL];
#if BITS
  Scale key_scales[UNROLL];
  Scale value_scales[UNROLL];
#endif
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const int position = tile + u * KEYS + which;
    const Place place = start + u * KEYS;
    seen[u] = position >= first && position < end;
    raw_keys[u] = {};
    raw_values[u] = {};
#if BITS
    key_scales[u] = {};
    value_scales[u] = {};
#endif
    if (seen[u] && at < D) {
      raw_keys[u] = *(const device Stored*)(key_pool + place * (D / PACKED) + at / PACKED);
#if BITS
      const Place group = place * KEY_GROUPS + at / GROUP;
      key_scales[u] = *(const device Scale*)(key_scale_pool + group * 2);
#endif
    }
    if (seen[u] && at < V) {
      raw_values[u] = *(const device Stored*)(value_pool + place * (V / PACKED) + at / PACKED);
#if BITS
      const Place group = place * VALUE_GROUPS + at / GROUP;
      value_scales[u] = *(const device Scale*)(value_scale_pool + group * 2);
#endif
    }
  }

  // 4. Scores: every lane of a key gets the sum over all its lanes.
  float score[UNROLL][G];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    float key[VEC];
#if BITS
    dequantise<BITS>(key, raw_keys[u], key_scales[u]);
#else
    widen(key, raw_keys[u]);
#endif
#pragma unroll
    for (int g = 0; g < G; g++) {
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < VEC; i++) {
        dot += query[g][i] * key[i];
      }
#pragma unroll
      for (int far = LANES / 2; far > 0; far /= 2) {
        dot += simd_shuffle_xor(dot, far);
      }
#if SOFT_CAP
      dot = CAP_SCALE * precise::tanh(dot);
#endif
      score[u][g] = seen[u] ? dot : LEAST;
    }
  }

  // 5. The softmax takes the tile in: once rescaled per tile, not per key.
#pragma unroll
  for (int g = 0; g < G; g++) {
    float larger = most[g];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      larger = fmax(larger, score[u][g]);
    }
    const float keep = exp2(most[g] - larger);
    most[g] = larger;
    total[g] *= keep;
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      sums[g][i] *= keep;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      score[u][g] = seen[u] ? exp2(score[u][g] - larger) : 0.0f;
      total[g] += score[u][g];
    }
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    float value[VEC];
#if BITS
    dequantise<BITS>(value, raw_values[u], value_scales[u]);
#else
    widen(value, raw_values[u]);
#endif
#pragma unroll
    for (int g = 0; g < G; g++) {
#pragma unroll
      for (int i = 0; i < VEC; i++) {
        sums[g][i] += score[u][g] * value[i];
      }
    }
  }
}

// 6. Lanes that hold the same part of different keys.
#pragma unroll
for (int far = LANES; far < 32; far *= 2) {
#pragma unroll
  for (int g = 0; g < G; g++) {
    const float their_most = simd_shuffle_xor(most[g], far);
    const float larger = fmax(most[g], their_most);
    const float keep = exp2(most[g] - larger);
    const float join = exp2(their_most - larger);
    most[g] = larger;
    total[g] = total[g] * keep + simd_shuffle_xor(total[g], far) * join;
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      sums[g][i] = sums[g][i] * keep + simd_shuffle_xor(sums[g][i], far) * join;
    }
  }
}

// 7. The warps, one head after another, so that the shared memory is small.
threadgroup float warp_most[WARPS][G];
threadgroup float warp_total[WARPS][G];
threadgroup float warp_sums[WARPS][V];
if (lane == 0) {
#pragma unroll
  for (int g = 0; g < G; g++) {
    warp_most[warp][g] = most[g];
    warp_total[warp][g] = total[g];
  }
}
#pragma unroll
for (int g = 0; g < G; g++) {
  if (which == 0 && at < V) {
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      warp_sums[warp][at + i] = sums[g][i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (g < num_heads) {
    float all_most = warp_most[0][g];
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
      all_most = fmax(all_most, warp_most[w][g]);
    }
#if SINKS && !SPLIT
    const float sink = float(sinks[head + g]) * LOG2_E;
    all_most = fmax(all_most, sink);
    float all_total = exp2(sink - all_most);
#else
    float all_total = 0.0f;
#endif
    float join[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      join[w] = exp2(warp_most[w][g] - all_most);
      all_total += warp_total[w][g] * join[w];
    }
    const Place out = (Place)item * HEADS + head + g;
    for (int d = thread_index; d < V; d += WARPS * 32) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        sum += warp_sums[w][d] * join[w];
      }
#if SPLIT
      part_sums[out * V + d] = sum;
#else
      output[out * V + d] = T(sum / all_total);
#endif
    }
#if SPLIT
    if (thread_index == 0) {
      part_stats[out * 2] = all_most;
      part_stats[out * 2 + 1] = all_total;
    }
#endif
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
