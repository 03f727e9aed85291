// One token of a selective state space: a state decays, takes the token's value under its input
// vector, and is asked with its output vector. A warp has ROWS rows of one head's state, of DS
// numbers each; its lanes divide the columns by VEC neighbours.
const int lane = threadIdx.x % 32;
const int warp = blockIdx.x * WARPS + threadIdx.x / 32;
constexpr int PER_HEAD = DH / ROWS;
constexpr int PARTS = DS / (32 * VEC);
const int first = warp % PER_HEAD * ROWS;
const int at = warp / PER_HEAD;
const int sequence = at / HEADS;
if (sequence >= x_shape[0]) {
  return;
}
const int head = at % HEADS;
const Place corner = ((Place)at * DH + first) * DS;
const Place shared = ((Place)sequence * GROUPS + head / (HEADS / GROUPS)) * DS;

// 1. All loads are under way before any is needed.
Chunk<float, VEC> rows[ROWS][PARTS];
#pragma unroll
for (int r = 0; r < ROWS; r++) {
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const Place place = corner + r * DS + (p * 32 + lane) * VEC;
    rows[r][p] = *(const Chunk<float, VEC>*)(before + place);
  }
}
float values[ROWS];
#pragma unroll
for (int r = 0; r < ROWS; r++) {
  values[r] = float(x[(Place)at * DH + first + r]) * dt[at];
}

// 2. The state as it is now, and what it gives.
float sums[ROWS] = {};
#pragma unroll
for (int p = 0; p < PARTS; p++) {
  const int column = (p * 32 + lane) * VEC;
  const Chunk<T, VEC> takes = *(const Chunk<T, VEC>*)(b + shared + column);
  const Chunk<T, VEC> gives = *(const Chunk<T, VEC>*)(c + shared + column);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      rows[r][p].at[i] = rows[r][p].at[i] * decay[at] + values[r] * float(takes.at[i]);
      sums[r] += rows[r][p].at[i] * float(gives.at[i]);
    }
    *(Chunk<float, VEC>*)(after + corner + r * DS + column) = rows[r][p];
  }
}
#pragma unroll
for (int far = 16; far > 0; far /= 2) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    sums[r] += __shfl_xor_sync(0xffffffff, sums[r], far);
  }
}
if (lane == 0) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    y[(Place)at * DH + first + r] = T(sums[r]);
  }
}
