// One threadgroup multiplies PANELS times 16 rows of the weight with all rows of x, by tensor
// cores. The warps divide the depth into chunks of 32, and their sums are added at the end. Within
// a chunk, one lane of four has 8 neighbouring numbers of two weight rows, and the same ones of x:
// the order of the sum is free, so nothing is rearranged for the tensor cores. If several weights
// lie one after the other, each has an output, and `ends` says where they end. With EXPERTS, each
// row of x chose one of several weights, [experts, width, depth]; `ids` names them in ascending
// order. A threadgroup takes the rows of one expert.
constexpr int CHUNK = 32;
constexpr int STRIDE = WARPS * CHUNK;
const int lane = threadIdx.x % 32;
const int warp = threadIdx.x / 32;
const int quad = lane / 4;
const int at = lane % 4;
const int num_rows = x_shape[0];
const int depth = x_shape[2];
#if EXPERTS
const int width = weight_shape[1];
const int groups = (width + PANELS * 16 - 1) / (PANELS * 16);
const int expert = blockIdx.x / groups;
const int first = blockIdx.x % groups * PANELS * 16;
const T* own = weight + (Place)expert * width * depth;
int limits[2];
for (int h = 0; h < 2; h++) {
  int low = 0;
  int high = num_rows;
  while (low < high) {
    const int middle = (low + high) / 2;
    if ((int)ids[middle] < expert + h) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  limits[h] = low;
}
const int begin_row = limits[0];
const int end_row = limits[1];
#else
const int width = weight_shape[0];
const int first = blockIdx.x * PANELS * 16;
const T* own = weight;
const int begin_row = 0;
const int end_row = num_rows;
#endif

for (int base = begin_row; base < end_row; base += TILES * 8) {
  // 1. Find where the lane's numbers begin. Rows beyond the end are read as the last one.
  const Piece* weights[PANELS][2];
#pragma unroll
  for (int p = 0; p < PANELS; p++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const Place row = min(first + p * 16 + h * 8 + quad, width - 1);
      weights[p][h] = (const Piece*)own + row * (depth / 8) + at;
    }
  }
  const T* inputs[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    inputs[t] = x + (Place)min(base + t * 8 + quad, end_row - 1) * depth + at * 8;
  }

  // 2. Multiply the chunks; AHEAD of them are loaded at once.
  float sums[PANELS][TILES][4] = {};
  for (int from = warp * CHUNK; from < depth; from += STRIDE * AHEAD) {
    Piece loaded[AHEAD][PANELS][2];
#pragma unroll
    for (int s = 0; s < AHEAD; s++) {
      const int chunk = from + s * STRIDE;
#pragma unroll
      for (int p = 0; p < PANELS; p++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if (chunk < depth) {
            loaded[s][p][h] = stream(weights[p][h] + chunk / 8);
          }
        }
      }
    }
#pragma unroll
    for (int s = 0; s < AHEAD; s++) {
      const int chunk = from + s * STRIDE;
      if (chunk < depth) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          const Piece theirs = *(const Piece*)(inputs[t] + chunk);
#pragma unroll
          for (int p = 0; p < PANELS; p++) {
            multiply(sums[p][t], loaded[s][p][0].at, loaded[s][p][1].at, theirs.at, T(0.0f));
            multiply(
                sums[p][t], loaded[s][p][0].at + 2, loaded[s][p][1].at + 2, theirs.at + 2, T(0.0f));
          }
        }
      }
    }
  }

  // 3. Add the warps' sums.
  __shared__ float parts[WARPS][PANELS * 16][TILES * 8 + 1];
#pragma unroll
  for (int p = 0; p < PANELS; p++) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        parts[warp][p * 16 + i / 2 * 8 + quad][t * 8 + at * 2 + i % 2] = sums[p][t][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < PANELS * 16 * TILES * 8; i += WARPS * 32) {
    const int column = i % (PANELS * 16);
    const int row = i / (PANELS * 16);
    if (base + row < end_row && first + column < width) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        sum += parts[w][column][row];
      }
#if EXPERTS
      output0[(Place)(base + row) * width + first + column] = T(sum);
#else
      int begin = 0;
      int which = 0;
      while (first + column >= ends[which]) {
        begin = ends[which];
        which++;
      }
      const Place place = (Place)row * (ends[which] - begin) + (first + column - begin);
#if OUTPUTS == 1
      output0[place] = T(sum);
#elif OUTPUTS == 2
      (which == 0 ? output0 : output1)[place] = T(sum);
#else
      (which == 0 ? output0 : which == 1 ? output1 : output2)[place] = T(sum);
#endif
#endif
    }
  }
#if EXPERTS
  __syncthreads();
#else
  break;  // all rows are in one tile
#endif
}
