// One threadgroup multiplies WIDE rows of a packed weight of 4 bits with up to 8 rows of x, by
// tensor cores. Lines of the weight's rows come to shared memory in spans of SPAN numbers, STAGES at
// a time. The warps divide a span into chunks of 128, and their sums are added at the end. A lane has
// 8 neighbouring numbers of two rows of the weight and the same ones of x, in pairs that need few
// operations to unpack: the order of a sum is free. What groups share is applied to their sums: of
// numbers raised by RAISED, the sum of x times that is taken away. With GATE, half of the rows are
// gates, and half are the numbers that these multiply (SwiGLU).
#if MXFP4
using Format = Mxfp4<T>;
#else
using Format = Affine4<T>;
constexpr float RAISED = Raised<T>::SUM;
#endif
using Scale = Format::Scale;
constexpr int ARRAYS = Format::ARRAYS;
constexpr int PANELS = WIDE / 16;
constexpr int OWN = GATE ? WIDE / 2 : WIDE;  // outputs
constexpr int LINES = WIDE / WARPS;  // that a warp loads
constexpr int PARTS = GROUP < 128 ? GROUP / 32 : 4;  // of 32 numbers, in a group and a chunk
// Sizes of a row in bytes; their last bytes make rows begin in different banks.
constexpr int LINE = SPAN / 2 + 16;
constexpr int SCALE_LINE = SPAN / GROUP * (int)sizeof(Scale) + 16;
constexpr int STAGE = WIDE * (LINE + ARRAYS * SCALE_LINE);
SHARED_PIECES(memory);
__shared__ unsigned long long arrivals[STAGES];
const int lane = threadIdx.x % 32;
const int warp = threadIdx.x / 32;
const int quad = lane / 4;
const int at = lane % 4;
const int num_rows = x_shape[0];
const int depth = x_shape[2];
const int width = weight_shape[0] / (GATE ? 2 : 1);
const int first = blockIdx.x * OWN;
const int spans = (depth + SPAN - 1) / SPAN;

// 1. Load spans. Rows beyond the weight's end are read as the last one.
const auto fetch_span = [&](int span) {
  char* to = (char*)memory + span % STAGES * STAGE;
  unsigned long long* arrival = &arrivals[span % STAGES];
  const int count = min(SPAN, depth - span * SPAN);
  const int bytes = count / 2;
  const int scale_bytes = count / GROUP * (int)sizeof(Scale);
  if (threadIdx.x == 0) {
    announce(arrival, WIDE * (bytes + ARRAYS * scale_bytes));
  }
  if (lane < LINES) {
    const int row = warp * LINES + lane;
    const int own = min(first + row % OWN, width - 1) + row / OWN * width;
    const Place from = (Place)own * depth + span * SPAN;
    fetch_line(to + row * LINE, (const char*)weight + from / 2, bytes, arrival);
    to += WIDE * LINE + row * SCALE_LINE;
    fetch_line(to, (const Scale*)scales + from / GROUP, scale_bytes, arrival);
#if !MXFP4
    to += WIDE * SCALE_LINE;
    fetch_line(to, (const Scale*)biases + from / GROUP, scale_bytes, arrival);
#endif
  }
};
if (threadIdx.x == 0) {
#pragma unroll
  for (int s = 0; s < STAGES; s++) {
    open_arrival(&arrivals[s], 1);
  }
}
__syncthreads();
#pragma unroll
for (int s = 0; s < STAGES; s++) {
  if (s < spans) {
    fetch_span(s);
  }
}

// 2. Multiply. Rows beyond the end of x are read as the last one.
const T* own_x = x + (Place)min(quad, num_rows - 1) * depth + at * 8;
// The compiler would move a constant to a register before every use.
const unsigned mask = num_rows < 0 ? 0 : LEVELS;
float sums[PANELS][4] = {};
for (int span = 0; span < spans; span++) {
  await_arrival(&arrivals[span % STAGES], span / STAGES % 2);
  const char* stage = (const char*)memory + span % STAGES * STAGE;
  const int end = min(SPAN, depth - span * SPAN);
  for (int chunk = warp * 128; chunk < end; chunk += WARPS * 128) {
    Piece theirs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      theirs[j] = *(const Piece*)(own_x + span * SPAN + chunk + j * 32);
    }
#pragma unroll
    for (int part = 0; part < 4; part += PARTS) {
      float own[PANELS][4] = {};
      float x_sums[4] = {};
#pragma unroll
      for (int j = part; j < part + PARTS; j++) {
        unsigned numbers[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const unsigned* halves = &theirs[j].at[i / 2];
          numbers[i] = __byte_perm(halves[0], halves[2], i % 2 ? 0x7632 : 0x5410);
        }
#if !MXFP4
        const unsigned ones[2] = {Raised<T>::ONES, Raised<T>::ONES};
        multiply(x_sums, ones, ones, numbers, T(0.0f));
        multiply(x_sums, ones, ones, numbers + 2, T(0.0f));
#endif
#pragma unroll
        for (int p = 0; p < PANELS; p++) {
          unsigned values[2][4];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const char* line = stage + (p * 16 + h * 8 + quad) * LINE;
            const unsigned word = ((const unsigned*)line)[(chunk + j * 32) / 8 + at];
#pragma unroll
            for (int i = 0; i < 4; i++) {
#if MXFP4
              values[h][i] = Format::two(word >> 4 * i);
#else
              values[h][i] = (word >> 4 * i & mask) | Raised<T>::BY;
#endif
            }
          }
          multiply(own[p], values[0], values[1], numbers, T(0.0f));
          multiply(own[p], values[0] + 2, values[1] + 2, numbers + 2, T(0.0f));
        }
      }
#pragma unroll
      for (int p = 0; p < PANELS; p++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const char* line = stage + WIDE * LINE + (p * 16 + h * 8 + quad) * SCALE_LINE;
          const int number = (chunk + part * 32) / GROUP;
          const unsigned scale = ((const Scale*)line)[number];
#if MXFP4
          const float factor = __uint_as_float(scale ? scale << 23 : 0x00400000u);
#else
          const float factor = widened(scale, T(0.0f));
          const unsigned bias = ((const Scale*)(line + WIDE * SCALE_LINE))[number];
          const float start = widened(bias, T(0.0f)) - RAISED * factor;
          sums[p][h * 2] += start * x_sums[0];
          sums[p][h * 2 + 1] += start * x_sums[1];
#endif
          sums[p][h * 2] += factor * own[p][h * 2];
          sums[p][h * 2 + 1] += factor * own[p][h * 2 + 1];
        }
      }
    }
  }
  __syncthreads();
  if (span + STAGES < spans) {
    fetch_span(span + STAGES);
  }
}

// 3. Add the warps' sums.
constexpr int SUMS = WIDE + 1;
float* parts = (float*)memory;  // [WARPS][8][SUMS]
#pragma unroll
for (int p = 0; p < PANELS; p++) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    parts[(warp * 8 + at * 2 + i % 2) * SUMS + p * 16 + i / 2 * 8 + quad] = sums[p][i];
  }
}
__syncthreads();
for (int i = threadIdx.x; i < OWN * 8; i += WARPS * 32) {
  const int column = i % OWN;
  const int row = i / OWN;
  if (row < num_rows && first + column < width) {
    float sum = 0.0f;
    float number = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      sum += parts[(w * 8 + row) * SUMS + column];
      number += GATE ? parts[(w * 8 + row) * SUMS + OWN + column] : 0.0f;
    }
    out[(Place)row * width + first + column] = GATE ? gated(sum, number, T(0.0f)) : T(sum);
  }
}
