// One threadgroup computes one item (a query row and a range of its keys) for G query heads of one
// KV head. The warps take tiles of TILE keys in turn. For scores, few lanes share a key, so that
// there is little to sum; for values, a lane has VEC columns of all heads, and other lanes have
// other keys. All lanes of a warp loop equally often.
typedef Chunk<unsigned, VEC * sizeof(T) / 4> Piece;
#if BITS
typedef Chunk<unsigned, VEC * BITS / 32> Stored;
typedef Chunk<M, 2> Scale;
constexpr int PACKED = 32 / BITS;
constexpr int KEY_GROUPS = (D + GROUP - 1) / GROUP;
constexpr int VALUE_GROUPS = (V + GROUP - 1) / GROUP;
#else
typedef Piece Stored;
constexpr int PACKED = 1;
#endif
constexpr int SCORE_KEYS = 32 / SCORE_LANES;
constexpr int SCORE_TRIPS = TILE / SCORE_KEYS;
constexpr int CHUNKS = (D / VEC + SCORE_LANES - 1) / SCORE_LANES;
constexpr bool EVEN = D % (VEC * SCORE_LANES) == 0;
constexpr int VALUE_KEYS = 32 / VALUE_LANES;
constexpr int VALUE_TRIPS = (TILE + VALUE_KEYS - 1) / VALUE_KEYS;
const int thread_index = thread_index_in_threadgroup;
const int lane = thread_index % 32;
const int warp = thread_index / 32;
const int score_key = lane / SCORE_LANES;
const int key_at = lane % SCORE_LANES * VEC;
const int value_key = lane / VALUE_LANES;
const int value_at = lane % VALUE_LANES * VEC;
const int value_from = min(value_at, V - VEC);
const int index = threadgroup_position_in_grid.x;
const int item = index / (KV_HEADS * PARTS);
const int kv_head = index / PARTS % KV_HEADS;
const int head = kv_head * SHARE + index % PARTS * G;
const int num_heads = SHARE - index % PARTS * G;
const auto fields = items + item * (4 + BIAS);
const int row = fields[0];
const int table = fields[1] * tables_shape[1];
const int first = fields[2];
const int end = fields[3];

// 1. Read the queries, scaled so that scores are exponents of two (before the soft cap: its
// argument).
threadgroup float query[G][D];
#if BITS
threadgroup float query_sum[G][D / VEC];
#endif
for (int i = thread_index; i < G * D / VEC; i += WARPS * 32) {
  const int g = i / (D / VEC);
  const int at = i % (D / VEC) * VEC;
  Piece raw = {};
  if (g < num_heads) {
    raw = *(const device Piece*)(queries + ((Place)row * HEADS + head + g) * D + at);
  }
  float wide[VEC];
  widen(wide, raw, T(0.0f));
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < VEC; j++) {
    query[g][at + j] = wide[j] * QUERY_SCALE;
    sum += query[g][at + j];
  }
#if BITS
  query_sum[g][at / VEC] = sum;
#endif
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// 2. Keep a running softmax per head: the warp's largest score, a lane's sum of its keys' weights,
// and its columns of the weighted values. Weights reach other lanes through shared memory, written
// to one half while the other may still be read.
threadgroup float weights[2][WARPS][TILE][G];
int half_now = 0;
float most[G];
float total[G];
float sums[G][VEC];
#if BITS
float leasts[G] = {};  // weighted least values, to be added to each of the sums
#endif
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
  // 3. Find the keys of a tile, which lies in one block. Unseen keys are never read, because they
  // may be another sequence's infinities: lanes without a key read the nearest one that is seen.
  const Place block = tables[table + tile / BLOCK_SIZE];
  const Place start = (block * KV_HEADS + kv_head) * BLOCK_SIZE + tile % BLOCK_SIZE;
  const auto tile_keys = key_pool + start * (D / PACKED) + key_at / PACKED;
  const int least_key = max(first - tile, 0);
  const int last_key = min(end - tile, TILE) - 1;
  Stored raw_keys[SCORE_TRIPS][CHUNKS];
#if BITS
  const auto tile_key_scales = key_scale_pool + start * (KEY_GROUPS * 2);
  Scale key_scales[SCORE_TRIPS][CHUNKS];
#endif
  bool seen[SCORE_TRIPS];
  float score[SCORE_TRIPS][G];
#pragma unroll
  for (int u = 0; u < SCORE_TRIPS; u++) {
    const int wanted = u * SCORE_KEYS + score_key;
    const int key = min(max(wanted, least_key), last_key);
    seen[u] = key == wanted;
#pragma unroll
    for (int g = 0; g < G; g++) {
      score[u][g] = seen[u] ? 0.0f : UNSEEN;
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int step = c * VEC * SCORE_LANES;
      if (EVEN || step + key_at < D) {
        raw_keys[u][c] = *(const device Stored*)(tile_keys + key * (D / PACKED) + step / PACKED);
#if BITS
        const int group = key * KEY_GROUPS + (step + key_at) / GROUP;
        key_scales[u][c] = *(const device Scale*)(tile_key_scales + group * 2);
#endif
      }
    }
  }

  // 4. Compute scores, of which a lane has a part. A quantised key is levels times step, which is
  // one factor for all of a lane's elements, plus the least value.
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = c * VEC * SCORE_LANES + key_at;
    if (EVEN || at < D) {
      float key[SCORE_TRIPS][VEC];
#pragma unroll
      for (int u = 0; u < SCORE_TRIPS; u++) {
#if BITS
        levels<BITS>(key[u], raw_keys[u][c]);
#else
        widen(key[u], raw_keys[u][c], T(0.0f));
#endif
      }
#pragma unroll
      for (int g = 0; g < G; g++) {
        float product[SCORE_TRIPS] = {};
#pragma unroll
        for (int i = 0; i < VEC; i++) {
          const float factor = query[g][at + i];
#pragma unroll
          for (int u = 0; u < SCORE_TRIPS; u++) {
            product[u] += factor * key[u][i];
          }
        }
#pragma unroll
        for (int u = 0; u < SCORE_TRIPS; u++) {
#if BITS
          const Scale scale = key_scales[u][c];
          const float least = query_sum[g][at / VEC] * float(scale.at[1]);
          score[u][g] += product[u] * float(scale.at[0]) + least;
#else
          score[u][g] += product[u];
#endif
        }
      }
    }
  }

  // 5. Load the tile's values early; they arrive while the softmax is computed.
  const auto tile_values = value_pool + start * (V / PACKED) + value_from / PACKED;
  Stored raw_values[VALUE_TRIPS];
#if BITS
  const auto tile_value_scales = value_scale_pool + start * (VALUE_GROUPS * 2);
  Scale value_scales[VALUE_TRIPS];
#endif
#pragma unroll
  for (int u = 0; u < VALUE_TRIPS; u++) {
    const int key = min(max(u * VALUE_KEYS + value_key, least_key), last_key);
    raw_values[u] = *(const device Stored*)(tile_values + key * (V / PACKED));
#if BITS
    const int group = key * VALUE_GROUPS + value_from / GROUP;
    value_scales[u] = *(const device Scale*)(tile_value_scales + group * 2);
#endif
  }

  // 6. Add the tile to the softmax, which is rescaled once per tile instead of once per key.
#pragma unroll
  for (int g = 0; g < G; g++) {
    float larger = most[g];
#pragma unroll
    for (int u = 0; u < SCORE_TRIPS; u++) {
#pragma unroll
      for (int far = SCORE_LANES / 2; far > 0; far /= 2) {
        score[u][g] += simd_shuffle_xor(score[u][g], far);
      }
#if SOFT_CAP
      score[u][g] = seen[u] ? CAP_SCALE * precise::tanh(score[u][g]) : UNSEEN;
#endif
#if BIAS
      // Unseen keys, and heads beyond the last one, take any bias there is.
      const int distance = max(fields[4] - tile - u * SCORE_KEYS - score_key, 0);
      const int biases = (head + g) % HEADS * bias_shape[1];
      score[u][g] += bias[biases + min(distance, bias_shape[1] - 1)] * LOG2_E;
#endif
      larger = fmax(larger, score[u][g]);
    }
#pragma unroll
    for (int far = SCORE_LANES; far < 32; far *= 2) {
      larger = fmax(larger, simd_shuffle_xor(larger, far));
    }
    const float keep = exp2(most[g] - larger);
    most[g] = larger;
    total[g] *= keep;
#if BITS
    leasts[g] *= keep;
#endif
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      sums[g][i] *= keep;
    }
#pragma unroll
    for (int u = 0; u < SCORE_TRIPS; u++) {
      score[u][g] = exp2(score[u][g] - larger);
      total[g] += score[u][g];
      if (key_at == 0) {
        weights[half_now][warp][u * SCORE_KEYS + score_key][g] = score[u][g];
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  // 7. Add the values times their weights.
#pragma unroll
  for (int u = 0; u < VALUE_TRIPS; u++) {
    const int key = u * VALUE_KEYS + value_key;
    float value[VEC];
#if BITS
    levels<BITS>(value, raw_values[u]);
#else
    widen(value, raw_values[u], T(0.0f));
#endif
#pragma unroll
    for (int g = 0; g < G; g++) {
      const bool has_key = VALUE_KEYS <= TILE || key < TILE;
      float weight = has_key ? weights[half_now][warp][key][g] : 0.0f;
#if BITS
      leasts[g] += weight * float(value_scales[u].at[1]);
      weight *= float(value_scales[u].at[0]);
#endif
#pragma unroll
      for (int i = 0; i < VEC; i++) {
        sums[g][i] += weight * value[i];
      }
    }
  }
  half_now = 1 - half_now;
}

// 8. Add the lanes that had other keys.
#pragma unroll
for (int g = 0; g < G; g++) {
#pragma unroll
  for (int far = SCORE_LANES; far < 32; far *= 2) {
    total[g] += simd_shuffle_xor(total[g], far);
  }
#pragma unroll
  for (int i = 0; i < VEC; i++) {
#if BITS
    sums[g][i] += leasts[g];
#endif
#pragma unroll
    for (int far = VALUE_LANES; far < 32; far *= 2) {
      sums[g][i] += simd_shuffle_xor(sums[g][i], far);
    }
  }
}

// 9. Add the warps, one head after another, so that little shared memory is needed.
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
  if (value_key == 0 && value_at < V) {
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      warp_sums[warp][value_at + i] = sums[g][i];
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
