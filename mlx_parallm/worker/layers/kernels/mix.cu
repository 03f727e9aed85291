// One token of a gated delta net, up to the rule: the convolution along the tokens, SiLU, and the
// lengths of queries and keys. A warp has one head of a query, key or value of one sequence: D
// channels, of which a lane takes every 32nd.
const int lane = threadIdx.x % 32;
const int warp = blockIdx.x * WARPS + threadIdx.x / 32;
constexpr int HEADS = 2 * K_HEADS + V_HEADS;
constexpr int CHANNELS = HEADS * D;
constexpr int PARTS = D / 32;
const int sequence = warp / HEADS;
const int head = warp % HEADS;
if (sequence >= x_shape[0]) {
  return;
}
const Place old = (Place)sequence * (WIDTH - 1) * CHANNELS;
float values[PARTS];
float squares = 0.0f;
#pragma unroll
for (int p = 0; p < PARTS; p++) {
  const int channel = head * D + p * 32 + lane;
  const T newest = x[sequence * x_strides[0] + channel * x_strides[2]];
  float sum = float(newest) * float(weight[channel * WIDTH + WIDTH - 1]);
#pragma unroll
  for (int i = 0; i < WIDTH - 1; i++) {
    const T one = before[old + i * CHANNELS + channel];
    sum += float(one) * float(weight[channel * WIDTH + i]);
    if (i > 0) {
      after[old + (i - 1) * CHANNELS + channel] = one;
    }
  }
  after[old + (WIDTH - 2) * CHANNELS + channel] = newest;
  values[p] = sum / (1.0f + exp2f(-sum * LOG2E));
  squares += values[p] * values[p];
}
#pragma unroll
for (int far = 16; far > 0; far /= 2) {
  squares += __shfl_xor_sync(0xffffffff, squares, far);
}
const float length = 1.0f / sqrtf(squares / D + EPSILON);
const float scale = head < K_HEADS ? QUERY * length : head < 2 * K_HEADS ? KEY * length : 1.0f;
#pragma unroll
for (int p = 0; p < PARTS; p++) {
  y[(Place)sequence * CHANNELS + head * D + p * 32 + lane] = T(values[p] * scale);
}
