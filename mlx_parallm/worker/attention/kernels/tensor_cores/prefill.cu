// One threadgroup computes an item: some tokens of a chunk and a range of their keys, with the
// SHARE query heads of one KV head, as 16 rows for each warp. Keys and values come through shared
// memory in tiles of KEYS, while earlier tiles are computed, with a running softmax
// (FlashAttention-2, arXiv:2307.08691). A lane has two of its warp's 16 rows, and every fourth pair
// of their columns.
constexpr int CHUNKS = (D + 31) / 32;  // chunks of 32 numbers in a query or key
// Size of a key in shared memory: an odd number of 64 bytes, so that lanes use different banks.
constexpr int KEY_ROW = CHUNKS * 4 + (CHUNKS % 2 ? 0 : 4);
constexpr int COLUMNS = V / 8;
constexpr int VALUE_ROW = COLUMNS + 1;  // an odd number of 16 bytes per value
constexpr int THREADS = WARPS * 32;
constexpr float EXPONENT = SOFT_CAP ? CAP_SCALE : QUERY_SCALE;
const int thread_index = threadIdx.x;
const int lane = thread_index % 32;
const int warp = thread_index / 32;
const int quad = lane / 4;
const int at = lane % 4;
const int item = blockIdx.x / KV_HEADS;
const int kv_head = blockIdx.x % KV_HEADS;
const int first_row = items[item * 8];
const int num_tokens = items[item * 8 + 1];
const int position = items[item * 8 + 2];
const int table = items[item * 8 + 3] * tables_shape[1];
const int begin = items[item * 8 + 4];
const int end = items[item * 8 + 5];
const int num_rows = num_tokens * SHARE;
__shared__ Piece tile_keys[KEYS][KEY_ROW];
__shared__ Piece tile_values[KEYS][VALUE_ROW];

// 1. Load a tile. Beyond the item's keys the last one is read, or the first: unseen keys are never
// read, because they may be another sequence's infinities.
const auto fetch_tile = [&](Piece* to, int row, const T* pool, int size, int width, int tile) {
#pragma unroll
  for (int j = 0; j < KEYS * width; j += THREADS) {
    const int i = (j + thread_index) / width;
    const int part = (j + thread_index) % width;
    const int key = max(begin, min(tile + i, end - 1));
    const Place block = tables[table + key / BLOCK_SIZE];
    const Place from = (block * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE;
    if (i < KEYS) {
      fetch(&to[i * row + part], (const Piece*)(pool + from * size) + part, part * 8 < size);
    }
  }
  close_fetches();
};
const auto fetch_keys = [&](int tile) {
  fetch_tile(tile_keys[0], KEY_ROW, key_pool, D, CHUNKS * 4, tile);
};
fetch_keys(begin / KEYS * KEYS);

// 2. Find the lane's two rows: their last key, and their numbers, the same of each key's chunks.
int seen[2];
Piece queries_of[2][CHUNKS];
#pragma unroll
for (int h = 0; h < 2; h++) {
  const int row = min(warp * 16 + h * 8 + quad, num_rows - 1);
  seen[h] = position + row / SHARE;
  const Place from = ((Place)(first_row + row / SHARE) * HEADS + kv_head * SHARE + row % SHARE) * D;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    Piece piece = {};
    if (c * 32 + at * 8 < D) {
      piece = *(const Piece*)(queries + from + c * 32 + at * 8);
    }
    queries_of[h][c] = piece;
  }
}
// All rows see the keys in this range, so masks are needed only outside it.
const int all_from = WINDOW ? max(begin, position + num_tokens - WINDOW) : begin;
const int all_to = min(end, position + 1);

float most[2] = {LEAST, LEAST};
float total[2] = {0.0f, 0.0f};
float sums[COLUMNS][4] = {};

for (int tile = begin / KEYS * KEYS; tile < end; tile += KEYS) {
  // 3. Compute scores of the rows, 8 keys at a time. All warps have finished the last tile's
  // values.
  await_fetches<0>();
  __syncthreads();
  fetch_tile(tile_values[0], VALUE_ROW, value_pool, V, COLUMNS, tile);
  float scores[KEYS / 8][4] = {};
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const Piece piece = tile_keys[n * 8 + quad][c * 4 + at];
      multiply(scores[n], queries_of[0][c].at, queries_of[1][c].at, piece.at, T(0.0f));
      multiply(scores[n], queries_of[0][c].at + 2, queries_of[1][c].at + 2, piece.at + 2, T(0.0f));
    }
  }
  __syncthreads();
  if (tile + KEYS < end) {
    fetch_keys(tile + KEYS);
  } else {
    close_fetches();
  }

  // 4. Update the softmax. Four lanes share the columns of a row.
#if SOFT_CAP
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      scores[n][i] = tanhf(scores[n][i] * QUERY_SCALE);
    }
  }
#endif
  if (tile < all_from || tile + KEYS > all_to) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = tile + n * 8 + at * 2 + i % 2;
        bool is_seen = key >= begin && key < end && key <= seen[i / 2];
#if WINDOW
        is_seen = is_seen && key > seen[i / 2] - WINDOW;
#endif
        scores[n][i] = is_seen ? scores[n][i] : UNSEEN;
      }
    }
  }
  float larger[2] = {most[0], most[1]};
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      larger[i / 2] = fmaxf(larger[i / 2], scores[n][i]);
    }
  }
  float shift[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int far = 1; far < 4; far *= 2) {
      larger[h] = fmaxf(larger[h], __shfl_xor_sync(0xffffffff, larger[h], far));
    }
    const float keep = power((most[h] - larger[h]) * EXPONENT);
    most[h] = larger[h];
    shift[h] = larger[h] * EXPONENT;
    total[h] *= keep;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      sums[n][h * 2] *= keep;
      sums[n][h * 2 + 1] *= keep;
    }
  }
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      scores[n][i] = power(scores[n][i] * EXPONENT - shift[i / 2]);
      total[i / 2] += scores[n][i];
    }
  }

  // 5. Add 16 keys and 16 columns of values at a time: a lane's weights lie where the tensor cores
  // need them.
  await_fetches<1>();
  __syncthreads();
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++) {
    const unsigned upper[2] = {
        packed(scores[2 * k][0], scores[2 * k][1], T(0.0f)),
        packed(scores[2 * k + 1][0], scores[2 * k + 1][1], T(0.0f))};
    const unsigned lower[2] = {
        packed(scores[2 * k][2], scores[2 * k][3], T(0.0f)),
        packed(scores[2 * k + 1][2], scores[2 * k + 1][3], T(0.0f))};
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      unsigned theirs[4];
      load_columns(theirs, &tile_values[k * 16 + lane % 16][n + lane / 16]);
      multiply(sums[n], upper, lower, theirs, T(0.0f));
      multiply(sums[n + 1], upper, lower, theirs + 2, T(0.0f));
    }
  }
}

// 6. Divide by the rows' totals.
#pragma unroll
for (int h = 0; h < 2; h++) {
#pragma unroll
  for (int far = 1; far < 4; far *= 2) {
    total[h] += __shfl_xor_sync(0xffffffff, total[h], far);
  }
  const int row = warp * 16 + h * 8 + quad;
  if (row < num_rows) {
    const int head = kv_head * SHARE + row % SHARE;
#if SPLIT
    // This is the item's part among a token's parts, which are adjacent.
    const int part = items[item * 8 + 6] + row / SHARE * items[item * 8 + 7];
    const Place to = (Place)part * HEADS + head;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      part_sums[to * V + n * 8 + at * 2] = sums[n][h * 2];
      part_sums[to * V + n * 8 + at * 2 + 1] = sums[n][h * 2 + 1];
    }
    if (at == 0) {
      part_stats[to * 2] = most[h] * EXPONENT;
      part_stats[to * 2 + 1] = total[h];
    }
#else
    float share = 1.0f / total[h];
#if SINKS
    const float sink = float(sinks[head]) * LOG2_E;
    const float larger = fmaxf(most[h] * EXPONENT, sink);
    const float keep = exp2f(most[h] * EXPONENT - larger);
    share = keep / (total[h] * keep + exp2f(sink - larger));
#endif
    const Place to = ((Place)(items[item * 8 + 6] + row / SHARE) * HEADS + head) * V;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      *(unsigned*)(output + to + n * 8 + at * 2) =
          packed(sums[n][h * 2] * share, sums[n][h * 2 + 1] * share, T(0.0f));
    }
#endif
  }
}
