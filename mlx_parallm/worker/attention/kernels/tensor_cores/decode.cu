// One threadgroup computes one item (a query row and a range of its keys) for G query heads of one
// KV head. The warps take tiles of 16 keys in turn. Whose numbers a lane has is free in sums: it
// loads 8 neighbouring numbers of a key, and the same ones of a query; and 8 neighbouring columns of
// four values, of which it pairs two keys at a time. Weights are two 16-bit numbers each: the
// rounded one, and what rounding left. While a tile is computed, the keys of the next one are on
// their way.
constexpr int KEYS = 16;
constexpr int CHUNKS = D / 32;  // chunks of 32 numbers in a query or key
constexpr int PARTS_OF_64 = V / 64;
constexpr int STRIDE = WARPS * KEYS;
const int thread_index = threadIdx.x;
const int lane = thread_index % 32;
const int warp = thread_index / 32;
const int quad = lane / 4;
const int at = lane % 4;
const int index = blockIdx.x;
const int item = index / (KV_HEADS * PARTS);
const int kv_head = index / PARTS % KV_HEADS;
const int head = kv_head * SHARE + index % PARTS * G;
const int num_heads = min(SHARE - index % PARTS * G, G);
const int row = items[item * 4];
const int table = items[item * 4 + 1] * tables_shape[1];
const int first = items[item * 4 + 2];
const int end = items[item * 4 + 3];

// 1. Find where tiles begin, and load keys and values. Unseen keys are never read, because they may
// be another sequence's infinities: in their place the nearest one that is seen is read.
const auto block_of = [&](int tile) { return tables[table + min(tile, end - 1) / BLOCK_SIZE]; };
const auto place_of = [&](int block, int tile) {
  return ((Place)block * KV_HEADS + kv_head) * BLOCK_SIZE + tile % BLOCK_SIZE;
};
const auto seen_key = [&](int key, int tile) {
  return min(max(key, first - tile), min(end - tile, KEYS) - 1);
};
Piece keys[2][CHUNKS];
const auto load_keys = [&](int block, int tile) {
  const T* from = key_pool + place_of(block, tile) * D + at * 8;
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      keys[n][c] = stream((const Piece*)(from + seen_key(n * 8 + quad, tile) * D + c * 32));
    }
  }
};

int tile = first / KEYS * KEYS + warp * KEYS;
int block = 0;
int next_block = 0;
if (tile < end) {
  block = block_of(tile);
  next_block = block_of(tile + STRIDE);
  load_keys(block, tile);
}

// 2. Read the lane's numbers of its head's query. Rows of other heads are zeros.
unsigned query[CHUNKS * 2][2];
#pragma unroll
for (int c = 0; c < CHUNKS; c++) {
  Piece piece = {};
  if (quad < num_heads) {
    piece = *(const Piece*)(queries + ((Place)row * HEADS + head + quad) * D + c * 32 + at * 8);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    query[c * 2 + i / 2][i % 2] = piece.at[i];
  }
}
const unsigned none[2] = {};

// 3. Keep a running softmax: the largest score and the sum of the lane's weights of the head with
// the number `quad`, and the weighted values of the heads `at * 2` and `at * 2 + 1`, whose products
// have heads as columns.
float most = LEAST;
float total = 0.0f;
float sums[PARTS_OF_64][4][4] = {};
for (; tile < end; tile += STRIDE) {
  // 4. Load the tile's values early; they arrive while scores are computed.
  const T* from = value_pool + place_of(block, tile) * V + quad * 8;
  Piece values[4][PARTS_OF_64];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int key = seen_key(k / 2 * 8 + at * 2 + k % 2, tile);
#pragma unroll
    for (int p = 0; p < PARTS_OF_64; p++) {
      values[k][p] = stream((const Piece*)(from + key * V + p * 64));
    }
  }
  block = next_block;
  next_block = block_of(tile + 2 * STRIDE);

  // 5. Compute scores, 8 keys at a time, as exponents of two; then load the next tile's keys.
  float products[2][4] = {};
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      multiply(products[n], query[c * 2], none, keys[n][c].at, T(0.0f));
      multiply(products[n], query[c * 2 + 1], none, keys[n][c].at + 2, T(0.0f));
    }
  }
  if (tile + STRIDE < end) {
    load_keys(block, tile + STRIDE);
  }
  float score[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    score[i] = products[i / 2][i % 2] * QUERY_SCALE;
#if SOFT_CAP
    score[i] = CAP_SCALE * tanhf(score[i]);
#endif
    const int key = i / 2 * 8 + at * 2 + i % 2;
    score[i] = seen_key(key, tile) == key ? score[i] : UNSEEN;
  }

  // 6. Add the tile to the softmax. Four lanes share a head.
  float larger = most;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    larger = fmaxf(larger, score[i]);
  }
#pragma unroll
  for (int far = 1; far < 4; far *= 2) {
    larger = fmaxf(larger, __shfl_xor_sync(0xffffffff, larger, far));
  }
  const float keep = power(most - larger);
  most = larger;
  total *= keep;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    score[i] = power(score[i] - larger);
    total += score[i];
  }
  const float keeps[2] = {from_lane(keep, at * 8), from_lane(keep, at * 8 + 4)};
#pragma unroll
  for (int p = 0; p < PARTS_OF_64; p++) {
#pragma unroll
    for (int m = 0; m < 4; m++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sums[p][m][i] *= keeps[i % 2];
      }
    }
  }

  // 7. Add the values times their weights, 16 columns at a time.
  const Chunk<unsigned, 2> weights = {
      {packed(score[0], score[1], T(0.0f)), packed(score[2], score[3], T(0.0f))}};
  float rounded[4];
  widen(rounded, weights, T(0.0f));
  const unsigned rests[2] = {
      packed(score[0] - rounded[0], score[1] - rounded[1], T(0.0f)),
      packed(score[2] - rounded[2], score[3] - rounded[3], T(0.0f))};
#pragma unroll
  for (int p = 0; p < PARTS_OF_64; p++) {
#pragma unroll
    for (int m = 0; m < 4; m++) {
      unsigned columns[2][2];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const unsigned even = values[k * 2][p].at[m];
        const unsigned odd = values[k * 2 + 1][p].at[m];
        columns[0][k] = __byte_perm(even, odd, 0x5410);
        columns[1][k] = __byte_perm(even, odd, 0x7632);
      }
      multiply(sums[p][m], columns[0], columns[1], weights.at, T(0.0f));
      multiply(sums[p][m], columns[0], columns[1], rests, T(0.0f));
    }
  }
}

// 8. Add the lanes that share a head, and the warps.
#pragma unroll
for (int far = 1; far < 4; far *= 2) {
  total += __shfl_xor_sync(0xffffffff, total, far);
}
__shared__ float warp_most[WARPS][G];
__shared__ float warp_total[WARPS][G];
__shared__ float warp_sums[WARPS][G][V];
if (quad < G && at == 0) {
  warp_most[warp][quad] = most;
  warp_total[warp][quad] = total;
}
#pragma unroll
for (int i = 0; i < 4; i++) {
  if (at * 2 + i % 2 < G) {
#pragma unroll
    for (int p = 0; p < PARTS_OF_64; p++) {
#pragma unroll
      for (int m = 0; m < 4; m++) {
        const int column = p * 64 + quad * 8 + m * 2 + i / 2;
        warp_sums[warp][at * 2 + i % 2][column] = sums[p][m][i];
      }
    }
  }
}
__syncthreads();
for (int g = 0; g < num_heads; g++) {
  float all_most = warp_most[0][g];
#pragma unroll
  for (int w = 1; w < WARPS; w++) {
    all_most = fmaxf(all_most, warp_most[w][g]);
  }
#if SINKS && !SPLIT
  const float sink = float(sinks[head + g]) * LOG2_E;
  all_most = fmaxf(all_most, sink);
  float all_total = exp2f(sink - all_most);
#else
  float all_total = 0.0f;
#endif
  float join[WARPS];
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    join[w] = exp2f(warp_most[w][g] - all_most);
    all_total += warp_total[w][g] * join[w];
  }
  const Place out = (Place)item * HEADS + head + g;
  for (int d = thread_index; d < V; d += WARPS * 32) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      sum += warp_sums[w][g][d] * join[w];
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
