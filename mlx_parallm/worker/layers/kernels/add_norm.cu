// One threadgroup adds a row to the residual stream, and normalises the sum (RMSNorm). The sum and
// the normalised numbers are rounded before the weight multiplies, as MLX's operations round.
typedef Chunk<T, VEC> Piece;
constexpr int THREADS = WARPS * 32;
constexpr int EACH = (SIZE / VEC + THREADS - 1) / THREADS;
const int lane = threadIdx.x % 32;
const int warp = threadIdx.x / 32;
const Place row = (Place)blockIdx.x * SIZE;
Piece sums[EACH];
float squares = 0.0f;
#pragma unroll
for (int e = 0; e < EACH; e++) {
  const int at = (e * THREADS + threadIdx.x) * VEC;
  if (at < SIZE) {
    const Piece one = *(const Piece*)(x + row + at);
    const Piece other = *(const Piece*)(change + row + at);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      sums[e].at[i] = T(float(one.at[i]) + float(other.at[i]));
      squares += float(sums[e].at[i]) * float(sums[e].at[i]);
    }
    *(Piece*)(sum + row + at) = sums[e];
  }
}
#pragma unroll
for (int far = 1; far < 32; far *= 2) {
  squares += __shfl_xor_sync(0xffffffff, squares, far);
}
__shared__ float parts[WARPS];
if (lane == 0) {
  parts[warp] = squares;
}
__syncthreads();
float total = 0.0f;
#pragma unroll
for (int w = 0; w < WARPS; w++) {
  total += parts[w];
}
const float norm = rsqrt(total / SIZE + EPSILON);
#pragma unroll
for (int e = 0; e < EACH; e++) {
  const int at = (e * THREADS + threadIdx.x) * VEC;
  if (at < SIZE) {
    const Piece factors = *(const Piece*)(weight + at);
    Piece scaled;
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      scaled.at[i] = T(float(T(float(sums[e].at[i]) * norm)) * float(factors.at[i]));
    }
    *(Piece*)(normalised + row + at) = scaled;
  }
}
