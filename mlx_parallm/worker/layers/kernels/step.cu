// The gated delta rule for one token, whose queries, keys and values lie one after the other. What
// the state decays by and the rate at which it learns come from a and b. Otherwise as delta.cu.
const int lane = threadIdx.x % 32;
const int warp = blockIdx.x * WARPS + threadIdx.x / 32;
constexpr int GROUPS = D / ROWS;
constexpr int PARTS = D / (32 * VEC);
const int first = warp % GROUPS * ROWS;
const int at = warp / GROUPS;
const int head = at % V_HEADS;
const int sequence = at / V_HEADS;
if (sequence >= mixed_shape[0]) {
  return;
}
const Place corner = ((Place)at * D + first) * D;
const T* query = mixed + (Place)sequence * (2 * K_HEADS + V_HEADS) * D;
const T* value = query + (2 * K_HEADS + head) * D + first;
query += head / (V_HEADS / K_HEADS) * D;
const T* key = query + K_HEADS * D;

// 1. The rows. All loads are under way before any is needed.
Chunk<float, VEC> rows[ROWS][PARTS];
#pragma unroll
for (int r = 0; r < ROWS; r++) {
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const Place place = corner + r * D + (p * 32 + lane) * VEC;
    rows[r][p] = *(const Chunk<float, VEC>*)(before + place);
  }
}
const float time = float(a[sequence * a_strides[0] + head * a_strides[2]]) + float(bias[head]);
const float soft = fmaxf(time, 0.0f) + logf(1.0f + exp2f(-fmaxf(time, -time) * LOG2E));
const float decay = exp2f(-exp2f(float(logs[head]) * LOG2E) * soft * LOG2E);
const float gate = float(b[sequence * b_strides[0] + head * b_strides[2]]);
const float rate = 1.0f / (1.0f + exp2f(-gate * LOG2E));

// 2. Decay, and what the rows have under the key.
float sums[ROWS] = {};
float keys[PARTS][VEC];
#pragma unroll
for (int p = 0; p < PARTS; p++) {
  const Chunk<T, VEC> loaded = *(const Chunk<T, VEC>*)(key + (p * 32 + lane) * VEC);
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    keys[p][i] = float(loaded.at[i]);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      rows[r][p].at[i] *= decay;
      sums[r] += rows[r][p].at[i] * keys[p][i];
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
float outputs[ROWS] = {};
#pragma unroll
for (int r = 0; r < ROWS; r++) {
  sums[r] = (float(value[r]) - sums[r]) * rate;
}
#pragma unroll
for (int p = 0; p < PARTS; p++) {
  const Chunk<T, VEC> loaded = *(const Chunk<T, VEC>*)(query + (p * 32 + lane) * VEC);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      rows[r][p].at[i] += keys[p][i] * sums[r];
      outputs[r] += rows[r][p].at[i] * float(loaded.at[i]);
    }
    *(Chunk<float, VEC>*)(after + corner + r * D + (p * 32 + lane) * VEC) = rows[r][p];
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
    y[(Place)at * D + first + r] = T(outputs[r]);
  }
}
