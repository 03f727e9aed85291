// The gated delta rule, token after token: a state decays, forgets what it has under the key, takes
// the value in its place, and is asked with the query. A warp has ROWS rows of one head's state, of
// DK numbers each, which stay in registers; its lanes divide the columns by VEC neighbours.
const int lane = threadIdx.x % 32;
const int warp = blockIdx.x * WARPS + threadIdx.x / 32;
const int num_tokens = v_shape[1];
constexpr int GROUPS = DV / ROWS;
constexpr int PARTS = DK / (32 * VEC);
const int first = warp % GROUPS * ROWS;
const int head = warp / GROUPS % V_HEADS;
const int sequence = warp / GROUPS / V_HEADS;
if (sequence >= v_shape[0]) {
  return;
}
const Place corner = (((Place)sequence * V_HEADS + head) * DV + first) * DK;

// 1. The rows. All loads are under way before any is needed.
Chunk<float, VEC> rows[ROWS][PARTS];
#pragma unroll
for (int r = 0; r < ROWS; r++) {
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const Place place = corner + r * DK + (p * 32 + lane) * VEC;
    rows[r][p] = *(const Chunk<float, VEC>*)(before + place);
  }
}

for (int t = 0; t < num_tokens; t++) {
  const Place token = (Place)sequence * num_tokens + t;
  const Place at = token * V_HEADS + head;
  const Place shared = (token * K_HEADS + head / (V_HEADS / K_HEADS)) * DK;

  // 2. Decay, and what the rows have under the key.
  float sums[ROWS] = {};
  Chunk<T, VEC> keys[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const int column = (p * 32 + lane) * VEC;
    keys[p] = *(const Chunk<T, VEC>*)(k + shared + column);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      const float decay = GATES ? g[at * DK + column + i] : g[at];
      const float key = float(keys[p].at[i]);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        rows[r][p].at[i] *= decay;
        sums[r] += rows[r][p].at[i] * key;
      }
    }
  }
#pragma unroll
  for (int far = 16; far > 0; far /= 2) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      sums[r] += __shfl_xor_sync(0xffffffff, sums[r], far);
    }
  }

  // 3. The value in its place, and what the rows have under the query.
  float deltas[ROWS];
  float outputs[ROWS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    deltas[r] = (float(v[at * DV + first + r]) - sums[r]) * beta[at];
  }
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const int column = (p * 32 + lane) * VEC;
    const Chunk<T, VEC> queries = *(const Chunk<T, VEC>*)(q + shared + column);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      const float key = float(keys[p].at[i]);
      const float query = float(queries.at[i]);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        rows[r][p].at[i] += key * deltas[r];
        outputs[r] += rows[r][p].at[i] * query;
      }
    }
  }
#pragma unroll
  for (int far = 16; far > 0; far /= 2) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      outputs[r] += __shfl_xor_sync(0xffffffff, outputs[r], far);
    }
  }
  if (lane == 0) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      y[at * DV + first + r] = T(outputs[r]);
    }
  }
}

// 4. The rows as they are now.
#pragma unroll
for (int r = 0; r < ROWS; r++) {
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const Place place = corner + r * DK + (p * 32 + lane) * VEC;
    *(Chunk<float, VEC>*)(after + place) = rows[r][p];
  }
}
