// Threadgroups multiply rows of a packed weight with one row of x, by tensor cores, 16 rows of the
// weight at a time: PANELS of them, one after the other. A column of a product belongs to a span of
// numbers that share a scale: x is zero in the columns of other spans. What groups share is applied
// to the sums of SPANS of them at once. The warps divide a row into chunks of SPANS spans. Weights
// come straight to registers: while a chunk is multiplied, the next one is on its way, be it of the
// next panel, and the first one while x is prepared. With GATE a panel is 8 rows of gates and the
// same 8 of the numbers that these multiply (SwiGLU). Roundings are those of MLX's operations.
//
// A launch may have several products: this text once for each, LINK of which this is, from the
// threadgroup FIRST on. The output of one is the x of the next, whose threadgroups load weights
// before they wait for the AWAITED ones that write it. LINK is 0 for one product alone, which may
// write COUNTS zeros: such a launch counts arrivals there.
//
// Numbers become float16 by a mask or a byte permutation: those of 4 and 8 bits are raised by 1,024,
// and every other one of 4 bits is 16 times as large before. So x is float16 too. What exceeds its
// range, or falls below, is prevented by a power of two for each span.
#if MXFP4
using Scale = unsigned char;
#else
using Scale = unsigned short;
#endif
constexpr int THREADS = WARPS * 32;
constexpr int SPAN = GROUP < 64 ? GROUP : 64;
constexpr int SPANS = 8;
constexpr int CHUNK = SPANS * SPAN;
constexpr int CHUNKS = DEPTH / CHUNK;
constexpr int EACH = 128 / BITS;                           // numbers of a piece
constexpr int PIECES = CHUNK / (4 * EACH);                 // of a row and lane, in a chunk
constexpr int TURN = AHEAD < PIECES ? 1 : AHEAD / PIECES;  // chunks that are on their way
constexpr bool IS_EVEN = CHUNKS % (TURN * WARPS) == 0;     // warps have equally many chunks
constexpr int SCALES = GROUP <= 64 ? 2 : 1;                // of the two columns of a lane
constexpr int OWN = GATE ? 8 : 16;                         // outputs of a panel
constexpr int LINE = DEPTH / 8;                            // pieces of x
constexpr int TIMES = (LINE + THREADS - 1) / THREADS;      // pieces of a thread
constexpr unsigned RAISED = 0x64006400u;  // 1,024 twice
using Shared = Chunk<Scale, SCALES>;
// What a span's sum becomes: times `factor`, plus `lift`, which takes away what numbers were raised
// by; and the sum of x.
struct alignas(16) Span {
  float factor;
  float lift;
  float sum;
};
SHARED_PIECES(memory);  // [LINE] of x
// Zeros are in other banks than the numbers that are read with them.
Piece* const zeros = memory + LINE + 4;
Span* const x_spans = (Span*)(zeros + EACH / 2);      // [DEPTH / SPAN]
float* const parts = (float*)(x_spans + DEPTH / SPAN);  // [2][WARPS][16]
const int lane = threadIdx.x % 32;
const int warp = threadIdx.x / 32;
const int quad = lane / 4;
const int at = lane % 4;
const int num_rows = x_shape[0];
const int width = weight_shape[0] / (GATE ? 2 : 1);
const int panels = (width + OWN - 1) / OWN;
const int per_group = (panels + THREADGROUPS - 1) / THREADGROUPS;
const int begin = (blockIdx.x - FIRST) * per_group;
const int end = min(begin + per_group, panels);

// 1. Load weights. Rows beyond the weight's end are read as the last one.
const auto row_of = [&](int panel, int h) {
  const int row = min(panel * OWN + quad + (GATE ? 0 : h * 8), width - 1);
  return row + (GATE ? h * width : 0);
};
Piece loaded[TURN * PIECES][2];
Shared factors[TURN][2];
#if !MXFP4
Shared starts[TURN][2];
#endif
const auto load_piece = [&](int t, int p, const int* rows, int chunk) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const Piece* from = (const Piece*)weight + (Place)rows[h] * (DEPTH / EACH);
    loaded[t * PIECES + p][h] = stream(from + (chunk * PIECES + p) * 4 + at);
  }
};
const auto load_scales = [&](int t, const int* rows, int chunk) {
  const int number = (chunk * SPANS + at * 2) * SPAN / GROUP;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const Place from = (Place)rows[h] * (DEPTH / GROUP) + number;
    factors[t][h] = *(const Shared*)((const Scale*)scales + from);
#if !MXFP4
    starts[t][h] = *(const Shared*)((const Scale*)biases + from);
#endif
  }
};
int rows[2] = {row_of(begin, 0), row_of(begin, 1)};
#pragma unroll
for (int t = 0; t < TURN; t++) {
  if (warp + t * WARPS < CHUNKS) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      load_piece(t, p, rows, warp + t * WARPS);
    }
    load_scales(t, rows, warp + t * WARPS);
  }
}

// 2. Prepare x.
#if LINK > 1
await_threadgroups(arrivals_pool + (LINK - 2) * SPACING, AWAITED);
#endif
#if NORM
__shared__ float squares[WARPS];
#endif
if (threadIdx.x < EACH / 2) {
  zeros[threadIdx.x] = {};
}
const Piece* const x_pieces = (const Piece*)x;
#if NORM
float square = 0.0f;
#pragma unroll
for (int t = 0; t < TIMES; t++) {
  const int i = t * THREADS + threadIdx.x;
  if (LINE % THREADS == 0 || i < LINE) {
    const Piece piece = x_pieces[i];
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float number = widened(piece.at[n / 2] >> n % 2 * 16 & 0xffff, T(0.0f));
      square += number * number;
    }
  }
}
#pragma unroll
for (int far = 1; far < 32; far *= 2) {
  square += __shfl_xor_sync(0xffffffff, square, far);
}
if (lane == 0) {
  squares[warp] = square;
}
__syncthreads();
#endif
#if NORM
float all_squares = 0.0f;
#pragma unroll
for (int w = 0; w < WARPS; w++) {
  all_squares += squares[w];
}
const float norm = rsqrt(all_squares / DEPTH + EPSILON);
#endif
// Three pieces at a time are on their way.
#pragma unroll 3
for (int t = 0; t < TIMES; t++) {
  const int i = t * THREADS + threadIdx.x;
  if (LINE % THREADS == 0 || i < LINE) {
    const Piece piece = x_pieces[i];
#if NORM
    const Piece gains = ((const Piece*)norm_weight)[i];
#endif
    float numbers[8];
    float most = 0.0f;
    float sum = 0.0f;
    float odd = 0.0f;  // the sum of numbers with an odd index
#pragma unroll
    for (int n = 0; n < 8; n++) {
      numbers[n] = widened(piece.at[n / 2] >> n % 2 * 16 & 0xffff, T(0.0f));
#if NORM
      const float gain = widened(gains.at[n / 2] >> n % 2 * 16 & 0xffff, T(0.0f));
      numbers[n] = float(T(float(T(numbers[n] * norm)) * gain));
#endif
      most = fmaxf(most, fabsf(numbers[n]));
      sum += numbers[n];
      odd += n % 2 ? numbers[n] : 0.0f;
    }
#pragma unroll
    for (int far = 1; far < SPAN / 8; far *= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, far));
#if !MXFP4
      sum += __shfl_xor_sync(0xffffffff, sum, far);
#if BITS == 4
      odd += __shfl_xor_sync(0xffffffff, odd, far);
#endif
#endif
    }
    // The largest number gets the exponent 14.
    const unsigned exponent = max(__float_as_uint(most) >> 23, 15u);
    const float up = __uint_as_float((268 - exponent) << 23);
    Piece pairs;
#pragma unroll
    for (int n = 0; n < 4; n++) {
#if BITS == 4
      const float less = !MXFP4 && n % 2 ? up / 16 : up;
      pairs.at[n] = packed(numbers[n] * less, numbers[n + 4] * less, float16_t(0.0f));
#else
      pairs.at[n] = packed(numbers[n * 2] * up, numbers[n * 2 + 1] * up, float16_t(0.0f));
#endif
    }
    // Lanes that read at the same time read neighbours.
    const int step = i / (EACH / 2);
    const int place = i % (EACH / 2);
    memory[step * (EACH / 2) + place % (EACH / 8) * 4 + place / (EACH / 8)] = pairs;
    if (i % (SPAN / 8) == 0) {
      Span span;
#if MXFP4
      // Numbers are 2^14 times too small.
      span.factor = __uint_as_float(exponent << 23);
      span.lift = 0.0f;
#else
      span.factor = __uint_as_float((exponent - 14) << 23);
      span.lift = -1024.0f * (BITS == 4 ? sum - odd * (15.0f / 16.0f) : sum);
#endif
      span.sum = sum;
      x_spans[i / (SPAN / 8)] = span;
    }
  }
}
__syncthreads();

// 3. Multiply.
// The compiler would move constants to registers before every use.
#if MXFP4
const unsigned sizes = num_rows < 0 ? 0 : 0x0e000e00u;
const unsigned signs = num_rows < 0 ? 0 : 0x80008000u;
#elif BITS == 4
const unsigned low = num_rows < 0 ? 0 : 0x000f000fu;
const unsigned high = num_rows < 0 ? 0 : 0x00f000f0u;
#else
const unsigned bytes = num_rows < 0 ? 0 : RAISED >> 8 | RAISED;
#endif
const Piece* const own_x = memory + at;
#pragma unroll 1
for (int panel = begin; panel < end; panel++) {
  const int next_rows[2] = {row_of(panel + 1, 0), row_of(panel + 1, 1)};
  float sums[2][2] = {};
#pragma unroll 1
  for (int first = 0; first < CHUNKS; first += TURN * WARPS) {
#pragma unroll
    for (int t = 0; t < TURN; t++) {
      const int chunk = first + t * WARPS + warp;
      if (IS_EVEN || chunk < CHUNKS) {
        const bool is_last = (IS_EVEN ? first : chunk) + TURN * WARPS >= CHUNKS;
        const int next = is_last ? warp + t * WARPS : chunk + TURN * WARPS;
        const bool has_next = !is_last || panel + 1 < end;
        const int from[2] = {is_last ? next_rows[0] : rows[0], is_last ? next_rows[1] : rows[1]};
        float own[4][4] = {};
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
          const bool owns = (p * 4 + at) * EACH / SPAN == quad;
          const Piece* numbers = owns ? own_x + (chunk * PIECES + p) * (EACH / 2) : zeros;
#pragma unroll
          for (int j = 0; j < EACH / 8; j++) {
            const Piece eight = numbers[j * 4];
            unsigned values[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const unsigned* words = &loaded[t * PIECES + p][h].at[j * BITS / 4];
#pragma unroll
              for (int i = 0; i < 4; i++) {
#if MXFP4
                // Exponent and mantissa as those of a float16 are 2^14 times too small.
                const unsigned size = i < 3 ? words[0] << (9 - 4 * i & 31) : words[0] >> 3;
                values[h][i] = (size & sizes) | (words[0] << (12 - 4 * i) & signs);
#elif BITS == 4
                values[h][i] = (words[0] >> i / 2 * 8 & (i % 2 ? high : low)) | RAISED;
#else
                values[h][i] = __byte_perm(words[i / 2], bytes, i % 2 ? 0x4342 : 0x4140);
#endif
              }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
              multiply(
                  own[j % 2 * 2 + half], values[0] + half * 2, values[1] + half * 2,
                  eight.at + half * 2, float16_t(0.0f));
            }
          }
          if (has_next) {
            load_piece(t, p, from, next);
          }
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const int number = chunk * SPANS + at * 2 + k;
          const Span span = x_spans[number];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int i = h * 2 + k;
            const float sum = (own[0][i] + own[1][i]) + (own[2][i] + own[3][i]);
            const unsigned scale = factors[t][h].at[k % SCALES];
#if MXFP4
            const float factor = __uint_as_float(scale ? scale << 23 : 0x00400000u);
            sums[h][k] += factor * (sum * span.factor);
#else
            sums[h][k] += widened(starts[t][h].at[k % SCALES], T(0.0f)) * span.sum;
            sums[h][k] += widened(scale, T(0.0f)) * (sum * span.factor + span.lift);
#endif
          }
        }
        if (has_next) {
          load_scales(t, from, next);
        }
      }
    }
  }
  rows[0] = next_rows[0];
  rows[1] = next_rows[1];

  // 4. Add the lanes' and warps' sums. A warp adds while others multiply the next panel.
  float* const own_parts = parts + (panel - begin) % 2 * (WARPS * 16);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float sum = sums[h][0] + sums[h][1];
#pragma unroll
    for (int far = 1; far < 4; far *= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, far);
    }
    if (at == 0) {
      own_parts[warp * 16 + h * 8 + quad] = sum;
    }
  }
  __syncthreads();
  const int column = panel * OWN + lane;
  if (warp == (panel - begin) % WARPS && lane < OWN && column < width) {
    float sum = 0.0f;
    float number = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      sum += own_parts[w * 16 + lane];
      number += GATE ? own_parts[w * 16 + lane + 8] : 0.0f;
    }
#if GATE
    out[column] = gated(sum, number, T(0.0f));
#elif RESIDUAL
    out[column] = T(float(residual[column]) + float(T(sum)));
#else
    out[column] = T(sum);
#endif
  }
}
#if LINK && !LAST
arrive_threadgroup((unsigned*)arrivals_pool + (LINK - 1) * SPACING);
#endif
#if COUNTS
static_assert(COUNTS <= THREADS, "a thread writes one");
if (blockIdx.x == 0 && threadIdx.x < COUNTS) {
  counts[threadIdx.x] = 0;
}
#endif
