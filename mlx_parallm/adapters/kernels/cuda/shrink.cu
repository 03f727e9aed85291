// One threadgroup: RANKS numbers of a module's low-rank input of up to ROWS rows. The modules read
// the same x, and their ranks lie one after the other in `low`; `plan` says where they end, and how
// many rows a threadgroup takes. Rows of slot 0 have no adapter: nothing is written for them.
typedef Chunk<T, VEC> Piece;
constexpr int WARPS = THREADS / 32;
const int thread_index = threadIdx.x;
const int lane = thread_index % 32;
const int warp = thread_index / 32;
const int num_rows = x_shape[0];
const int depth = x_shape[2];
const int total = plan[2];
const int count = plan[3];
const int parts = total / RANKS;
const int group = blockIdx.x;
const int first = group / parts * count;
const int at = group % parts * RANKS;
const T* factors = a0;
int begin = 0;
int ranks = a0_shape[1];
if (at >= plan[0]) {
  factors = a1;
  begin = plan[0];
  ranks = a1_shape[1];
}
if (at >= plan[1]) {
  factors = a2;
  begin = plan[1];
  ranks = a2_shape[1];
}

// 1. Every thread its numbers of x. Factors are loaded anew only where the adapter is another one.
float sums[ROWS][RANKS] = {};
for (int from = thread_index * VEC; from < depth; from += THREADS * VEC) {
  float weights[RANKS][VEC];
  int held = 0;
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int row = first + i;
    const int slot = i < count && row < num_rows ? slots[row] : 0;
    if (slot != 0) {
      if (slot != held) {
        held = slot;
        const T* mine = factors + ((Place)slot * ranks + at - begin) * depth + from;
#pragma unroll
        for (int j = 0; j < RANKS; j++) {
          const Piece piece = *(const Piece*)(mine + (Place)j * depth);
#pragma unroll
          for (int k = 0; k < VEC; k++) {
            weights[j][k] = float(piece.at[k]);
          }
        }
      }
      const Piece piece = *(const Piece*)(x + (Place)row * depth + from);
#pragma unroll
      for (int k = 0; k < VEC; k++) {
#pragma unroll
        for (int j = 0; j < RANKS; j++) {
          sums[i][j] += float(piece.at[k]) * weights[j][k];
        }
      }
    }
  }
}

// 2. The sums of all threads.
__shared__ float warp_sums[WARPS][ROWS * RANKS];
#pragma unroll
for (int i = 0; i < ROWS; i++) {
  if (i < count) {
#pragma unroll
    for (int j = 0; j < RANKS; j++) {
      float sum = sums[i][j];
#pragma unroll
      for (int far = 16; far > 0; far /= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, far);
      }
      if (lane == 0) {
        warp_sums[warp][i * RANKS + j] = sum;
      }
    }
  }
}
__syncthreads();
const int row = first + thread_index / RANKS;
if (thread_index < count * RANKS && row < num_rows && slots[row] != 0) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    sum += warp_sums[w][thread_index];
  }
  low[(Place)row * total + at + thread_index % RANKS] = sum;
}
