// One threadgroup multiplies WIDE rows of a packed weight with ROWS rows of x, by products of
// warpgroups. A chunk of the depth comes to shared memory while earlier ones are multiplied, STAGES
// of them at a time; values are unpacked into registers. Warpgroups divide the rows of the weight
// and, by SLABS, the chunk: 64 numbers each. Sums of the same rows are added at the end. SPLITS
// threadgroups divide the depth of the same rows: outputs are then float32, and another kernel adds.
// The scales of RING spans are in shared memory: those of the chunks that are there.
#if MXFP4
using Format = Mxfp4<T>;
#elif BITS == 4
using Format = Affine4<T>;
#else
using Format = Affine8<T>;
#endif
using Scale = Format::Scale;
constexpr int ARRAYS = Format::ARRAYS;
constexpr int THREADS = 2 * WIDE * SLABS;
constexpr int PIECES = BITS / 2;  // pieces of 64 numbers
constexpr int X_SLAB = ROWS * 8;
constexpr int SLAB = WIDE * PIECES;
constexpr int STAGE = SLABS * (X_SLAB + SLAB);
constexpr int CHUNK = 64 * SLABS;
constexpr int SPAN = 16 / (int)sizeof(Scale) * GROUP;  // numbers whose scales are a piece
SHARED_PIECES(memory);
Piece* const stages = memory + (64 - shared_place(memory) / 16 % 64) % 64;
Piece* const ring = stages + STAGES * STAGE;
const int thread_index = threadIdx.x;
const int warp = thread_index / 32;
const int quad = thread_index % 32 / 4;
const int at = thread_index % 4;
const int own_slab = warp / (WIDE / 16);
const int own_row = warp % (WIDE / 16) * 16 + quad;
const int num_rows = x_shape[0];
const int depth = x_shape[2];
const int width = weight_shape[0];
const int columns = (width + WIDE - 1) / WIDE;
const int split = blockIdx.x % SPLITS;
const int first = blockIdx.x / SPLITS % columns * WIDE;
const int base = blockIdx.x / SPLITS / columns * ROWS;
const int first_span = depth / SPAN * split / SPLITS;
const int chunks = (depth / SPAN * (split + 1) / SPLITS - first_span) * (SPAN / CHUNK);

// 1. Load chunks. Pieces are in such an order that lanes use different banks. Rows beyond the end
// of x are zeros, those beyond the weight's end are read as the last one. A thread loads pieces
// THREADS apart, of the same place in a row: where they begin is computed once.
constexpr int X_STEP = X_SLAB < THREADS ? X_SLAB / 8 : THREADS / 8;  // rows
constexpr int X_TURNS = (X_SLAB + THREADS - 1) / THREADS;            // in a slab
constexpr int X_SLABS = X_SLAB < THREADS ? THREADS / X_SLAB : 1;     // in a turn
const int x_row = base + thread_index % X_SLAB / 8;
const int x_to = thread_index ^ thread_index / 8 % 8;
const T* x_from = x + (Place)min(x_row, num_rows - 1) * depth;
x_from += thread_index / X_SLAB * 64 + thread_index % 8 * 8 + first_span * SPAN;
constexpr int TURNS = (SLABS * SLAB + THREADS - 1) / THREADS;
const Piece* from[TURNS];
#pragma unroll
for (int j = 0; j < TURNS; j++) {
  const int i = j * THREADS + thread_index;
  const Place row = min(first + i % SLAB / PIECES, width - 1);
  from[j] = (const Piece*)weight + row * (depth / 128 * BITS) + i / SLAB * PIECES + i % PIECES;
  from[j] += first_span * (SPAN / 64) * PIECES;
}
const int to = thread_index ^ thread_index / 8 % PIECES;
const Place scale_row = min(first + thread_index % WIDE, width - 1);
#if MXFP4
const Scale* scale_from = (const Scale*)scales + scale_row * (depth / GROUP);
#else
const Scale* scale_from =
    (const Scale*)(thread_index < WIDE ? scales : biases) + scale_row * (depth / GROUP);
#endif
int fetched = 0;  // chunks
int free_stage = 0;
const auto fetch_chunk = [&]() {
  if (fetched < chunks) {
    Piece* stage = stages + free_stage * STAGE;
#pragma unroll
    for (int j = 0; j < SLABS / X_SLABS * X_TURNS; j++) {
      const int rows = j % X_TURNS * X_STEP;
      const bool exists = x_row + rows < num_rows;
      const T* piece = x_from + (exists ? rows * depth : 0) + j / X_TURNS * X_SLABS * 64;
      const int slab = j / X_TURNS * max(X_SLAB, THREADS);
      if (THREADS % X_SLAB == 0 || X_SLAB % THREADS == 0 || thread_index / 8 + rows < ROWS) {
        fetch(&stage[slab + j % X_TURNS * THREADS + x_to], (const Piece*)piece, exists);
      }
    }
    stage += SLABS * X_SLAB;
#pragma unroll
    for (int j = 0; j < TURNS; j++) {
      if (SLABS * SLAB % THREADS == 0 || j * THREADS + thread_index < SLABS * SLAB) {
        fetch(&stage[j * THREADS + to], from[j], true);
      }
      from[j] += SLABS * PIECES;
    }
    x_from += CHUNK;
    if (fetched % (SPAN / CHUNK) == 0 && thread_index < ARRAYS * WIDE) {
      const int span = fetched / (SPAN / CHUNK);
      Piece* scale_to = ring + span % RING * ARRAYS * WIDE + thread_index;
      fetch(scale_to, (const Piece*)scale_from + first_span + span, true);
    }
    fetched++;
    free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
  }
  close_fetches();
};
#pragma unroll
for (int c = 0; c < STAGES - 2; c++) {
  fetch_chunk();
}

// 2. Multiply. A lane unpacks neighbouring numbers of two rows: two of each piece of x.
#if BITS == 4
const unsigned selector = at * 0x0011 + (at + 4) * 0x1100;
// The compiler would move a constant to a register before every use.
const unsigned mask = num_rows < 0 ? 0 : LEVELS;
#else
const unsigned selector = 0x7404 + at % 2 * 0x20;
// The compiler would move a constant to a register before every use.
const unsigned bytes = num_rows < 0 ? 0 : BYTES;
#endif
float sums[ROWS / TILE_ROWS][TILE_ROWS / 2];
unsigned values[2][2][4];
Group groups[2];
int stage_index = 0;
for (int c = 0; c < chunks; c++) {
  await_fetches<STAGES - 3>();
  publish();
  __syncthreads();
  // The chunk that this one takes the place of is the last but one: its products are done.
  fetch_chunk();
  const Piece* slab = stages + stage_index * STAGE;
  stage_index = stage_index + 1 == STAGES ? 0 : stage_index + 1;
  const Piece* x_slab = slab + own_slab * X_SLAB;
  slab += SLABS * X_SLAB + own_slab * SLAB;
  const Piece* scale_pieces = ring + c / (SPAN / CHUNK) % RING * ARRAYS * WIDE + own_row;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (GROUP < 64 || half == 0) {
      const int number = (c % (SPAN / CHUNK) * CHUNK + own_slab * 64 + half * 32) / GROUP;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const Scale* scale = (const Scale*)(scale_pieces + h * 8) + number;
        groups[h] = Format::group(*scale, scale[(ARRAYS - 1) * WIDE * 16 / (int)sizeof(Scale)]);
      }
    }
    await_tiles<1>();
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const Group group = groups[h];
      const int row = own_row + h * 8;
      const Piece* line = slab + row * PIECES;
      const int turn = row * PIECES / 8 % PIECES;
#pragma unroll
      for (int n = 0; n < 2; n++) {
#if BITS == 4
        const Piece* piece = &line[half ^ turn];
        const unsigned both = __byte_perm(piece->at[n * 2], piece->at[n * 2 + 1], selector);
        const unsigned even = Format::two(both, group, mask);
        const unsigned odd = Format::two(both >> 4, group, mask);
        values[half][n][h] = __byte_perm(even, odd, 0x5410);
        values[half][n][2 + h] = __byte_perm(even, odd, 0x7632);
#else
        const Piece* piece = &line[half * 2 + n ^ turn];
        const unsigned low = piece->at[at / 2];
        const unsigned high = piece->at[2 + at / 2];
        values[half][n][h] = Format::two(low, low, selector, selector + 16, group, bytes);
        values[half][n][2 + h] = Format::two(high, high, selector, selector + 16, group, bytes);
#endif
      }
    }
    begin_tiles();
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int t = 0; t < ROWS / TILE_ROWS; t++) {
        const Piece* tile = x_slab + t * TILE_ROWS * 8 + (half * 2 + n) * 2;
        multiply_tile(sums[t], values[half][n], columns_at(tile), c + half + n > 0, T(0.0f));
      }
    }
    end_tiles();
  }
}
await_tiles<0>();
__syncthreads();

// 3. Add the slabs' sums.
constexpr int LINE = WIDE + 4;
float* parts = (float*)stages;  // [SLABS][ROWS][LINE]
#pragma unroll
for (int t = 0; t < ROWS / TILE_ROWS; t++) {
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 2; i++) {
    const int row = t * TILE_ROWS + i / 4 * 8 + at * 2 + i % 2;
    parts[(own_slab * ROWS + row) * LINE + own_row + i % 4 / 2 * 8] = sums[t][i];
  }
}
__syncthreads();
for (int i = thread_index; i < ROWS * WIDE / 2; i += THREADS) {
  const int row = i / (WIDE / 2);
  const int column = i % (WIDE / 2) * 2;
  if (base + row < num_rows && first + column < width) {
    float low = 0.0f;
    float high = 0.0f;
#pragma unroll
    for (int s = 0; s < SLABS; s++) {
      low += parts[(s * ROWS + row) * LINE + column];
      high += parts[(s * ROWS + row) * LINE + column + 1];
    }
    const Place place = ((Place)split * num_rows + base + row) * width + first + column;
#if SPLITS > 1
    out[place] = low;
    if (first + column + 1 < width) {
      out[place + 1] = high;
    }
#else
    T* to = out + place;
    if (width % 2 == 0) {
      *(unsigned*)to = packed(low, high, T(0.0f));
    } else {
      // A row may begin within a word, and ends with one number.
      to[0] = T(low);
      if (first + column + 1 < width) {
        to[1] = T(high);
      }
    }
#endif
  }
}
