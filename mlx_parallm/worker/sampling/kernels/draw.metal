// One threadgroup samples one row. `settings` has the row's temperature (0: greedy), top-k (0:
// all), top-p (1: all) and the logarithm of min-p. Nothing is sorted: the smallest logit kept is
// found digit by digit, from sums over the larger ones. A thread has the same logits in every
// batch, and sums of its own, which are added in a fixed order, so results do not depend on the
// batch.
typedef Chunk<T, VEC> Piece;
constexpr int WARPS = THREADS / 32;
constexpr int DIGIT_BITS = 4;
constexpr int DIGITS = 1 << DIGIT_BITS;
constexpr int TOP_SHIFT = (32 - DROP - 1) / DIGIT_BITS * DIGIT_BITS;
constexpr int HALF = (V + 1) / 2;
constexpr int NOBODY = 0x7fffffff;
const int thread_index = thread_index_in_threadgroup;
const int lane = thread_index % 32;
const int warp = thread_index / 32;
const int row = threadgroup_position_in_grid.x;
const auto mine = logits + (Place)row * V;
const bool is_greedy = settings[row * 4] == 0.0f;
const float temperature = is_greedy ? 1.0f : settings[row * 4];
const float top_k = settings[row * 4 + 1];
const float top_p = settings[row * 4 + 2];
const float log_min_p = settings[row * 4 + 3];
const float scale = LOG2_E / temperature;
const unsigned seed = keys[row * 2];
const unsigned position = keys[row * 2 + 1];

// 1. Find the largest logit.
unsigned most = 0;
for (int i = thread_index; i < V / VEC; i += THREADS) {
  const Piece piece = *((const device Piece*)mine + i);
#pragma unroll
  for (int j = 0; j < VEC; j++) {
    const unsigned key = order_nan(float(piece.at[j]), DROP);
    most = key > most ? key : most;
  }
}
#pragma unroll
for (int far = 16; far > 0; far /= 2) {
  const unsigned theirs = simd_shuffle_xor(most, far);
  most = theirs > most ? theirs : most;
}
threadgroup unsigned warp_most[WARPS];
if (lane == 0) {
  warp_most[warp] = most;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int w = 0; w < WARPS; w++) {
  most = warp_most[w] > most ? warp_most[w] : most;
}
const float largest = number_of(most, DROP);

// 2. Find the smallest key that is kept. min-p gives it directly; top-k counts the keys above a
// key, then top-p sums their weights. Only keys above `low` take part, and of those that tie with
// the k-th as many as belong to the k.
threadgroup float sums[DIGITS][THREADS];
threadgroup float totals[DIGITS];
// A row with NaN keeps only these, so that all of its scores are NaN.
unsigned floor_key = is_greedy || largest != largest ? most : 0u;
if (log_min_p >= -1e30f) {
  floor_key = first_key(largest / temperature + log_min_p, temperature, most, DROP);
}
unsigned low = floor_key > 0 ? floor_key - 1 : 0u;
float tied_weight = 0.0f;
for (int search = 0; search < 2; search++) {
  const bool is_count = search == 0;
  if (is_greedy || (is_count ? top_k < 1.0f || top_k >= V : top_p >= 1.0f)) {
    continue;
  }
  float limit = top_k;
  float above = 0.0f;
  unsigned prefix = 0;
  for (int shift = TOP_SHIFT; shift >= 0; shift -= DIGIT_BITS) {
    // A thread's sum for each digit, over the keys that share the digits found so far.
#pragma unroll
    for (int d = 0; d < DIGITS; d++) {
      sums[d][thread_index] = 0.0f;
    }
    for (int i = thread_index; i < V / VEC; i += THREADS) {
      const Piece piece = *((const device Piece*)mine + i);
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        const float number = float(piece.at[j]);
        const unsigned key = order(number, DROP);
        if (key > low && key >> shift >> DIGIT_BITS == prefix) {
          const float weight = is_count ? 1.0f : exp2((number - largest) * scale);
          sums[key >> shift & (DIGITS - 1)][thread_index] += weight;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int d = warp; d < DIGITS; d += WARPS) {
      float total = 0.0f;
      for (int w = 0; w < WARPS; w++) {
        total += sums[d][w * 32 + lane];
      }
#pragma unroll
      for (int far = 16; far > 0; far /= 2) {
        total += simd_shuffle_xor(total, far);
      }
      if (lane == 0) {
        totals[d] = total;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (!is_count && shift == TOP_SHIFT) {
      limit = tied_weight;
      for (int d = DIGITS - 1; d >= 0; d--) {
        limit += totals[d];
      }
      limit *= top_p;
    }
    // Find the smallest digit with less than the limit above it.
    int digit = DIGITS - 1;
    while (digit > 0 && above + totals[digit] < limit) {
      above += totals[digit];
      digit--;
    }
    prefix = prefix << DIGIT_BITS | digit;
  }
  if (is_count && prefix > low) {
    tied_weight = (limit - above) * exp2((number_of(prefix, DROP) - largest) * scale);
    low = prefix;
  }
  floor_key = prefix > floor_key ? prefix : floor_key;
}
floor_key = floor_key < most ? floor_key : most;

// 3. Keep the logits that are at least as large after division. The token has the largest sum of
// logit and noise, and the lowest id if they are equal or NaN; MLX makes the bits of the tokens i
// and i + HALF at once.
const float least = number_of(floor_key, DROP) / temperature;
const unsigned kept = floor_key > 0 ? first_key(least, temperature, floor_key, DROP) : 0u;
float best = as_type<float>(0xff800000u);
int best_id = NOBODY;
for (int i = thread_index * VEC; i < HALF; i += THREADS * VEC) {
  const bool has_other = i + HALF < V;
  Piece pieces[2];
  pieces[0] = *(const device Piece*)(mine + i);
  pieces[1] = *(const device Piece*)(mine + (has_other ? i + HALF : i));
#pragma unroll
  for (int j = 0; j < VEC; j++) {
    const bool is_kept[2] = {
        order_nan(float(pieces[0].at[j]), DROP) >= kept,
        has_other && order_nan(float(pieces[1].at[j]), DROP) >= kept};
    if (is_kept[0] || is_kept[1]) {
      const Chunk<unsigned, 2> bits =
          random_bits(seed, position, i + j, has_other ? i + j + HALF : 0);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (is_kept[h]) {
          const float noise = is_greedy ? 0.0f : gumbel(bits.at[h]);
          const float score = float(pieces[h].at[j]) / temperature + noise;
          const int id = i + j + h * HALF;
          if (score > best || (!(score < best) && id < best_id)) {
            best = score;
            best_id = id;
          }
        }
      }
    }
  }
}

// 4. Find the best of the threadgroup, the lowest id among equals.
#pragma unroll
for (int far = 16; far > 0; far /= 2) {
  const float their_best = simd_shuffle_xor(best, far);
  const int their_id = simd_shuffle_xor(best_id, far);
  if (their_best > best || (!(their_best < best) && their_id < best_id)) {
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
    if (warp_best[w] > best || (!(warp_best[w] < best) && warp_id[w] < best_id)) {
      best = warp_best[w];
      best_id = warp_id[w];
    }
  }
  tokens[row] = best_id;
  floors[row] = floor_key > 0 ? least : as_type<float>(0xff800000u);
}
