// One threadgroup adds a row to the residual stream, and normalises the sum (RMSNorm) if NORM. The
// sum and the normalised numbers are rounded before the weight multiplies, as MLX's operations
// round. With IN_PARTS, the row is the sum of several float32 ones, and is rounded first.
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
#if IN_PARTS
    float total[VEC] = {};
    for (int p = 0; p < change_shape[0]; p++) {
      const float* part = change + (Place)p * change_shape[1] * SIZE + row + at;
#pragma unroll
      for (int j = 0; j < VEC; j += 4) {
        const Chunk<float, 4> four = *(const Chunk<float, 4>*)(part + j);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          total[j + i] += four.at[i];
        }
      }
    }
    Piece other;
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      other.at[i] = T(total[i]);
    }
#else
    const Piece other = *(const Piece*)(change + row + at);
#endif
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      sums[e].at[i] = T(float(one.at[i]) + float(other.at[i]));
      squares += float(sums[e].at[i]) * float(sums[e].at[i]);
    }
    *(Piece*)(sum + row + at) = sums[e];
  }
}
#if NORM
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
#endif
