// One threadgroup multiplies WIDE rows of a packed weight with ROWS rows of x, by products of
// warpgroups. One warpgroup copies chunks of the depth to shared memory, STAGES of them at a time;
// the others multiply those that have come, and unpack values into registers meanwhile. They divide
// the rows of the weight and, by SLABS, the chunk: 64 numbers each. Nobody waits for all others: a
// chunk is announced when it has come, and its room is given back when all warps have multiplied it.
// Sums of the same rows are added at the end. SPLITS threadgroups divide the depth of the same rows:
// outputs are then float32, and another kernel adds. The scales of RING spans are in shared memory:
// those of the chunks that are there. With GATE, half of a threadgroup's rows are gates, and half
// are the numbers that these multiply (SwiGLU).
#if MXFP4
using Format = Mxfp4<T>;
#elif BITS == 4
using Format = Affine4<T>;
#else
using Format = Affine8<T>;
#endif
using Scale = Format::Scale;
constexpr int ARRAYS = Format::ARRAYS;
constexpr int MULTIPLIERS = 2 * WIDE * SLABS;  // threads
constexpr int LOADERS = 128;
constexpr int OWN = GATE ? WIDE / 2 : WIDE;  // outputs of a row of x
constexpr int PIECES = BITS / 2;             // pieces of 64 numbers
constexpr int X_SLAB = ROWS * 8;
constexpr int SLAB = WIDE * PIECES;
constexpr int WEIGHTS = SLABS * X_SLAB;  // where they begin in a stage
constexpr int STAGE = SLABS * (X_SLAB + SLAB);
constexpr int CHUNK = 64 * SLABS;
constexpr int SPAN = 16 / (int)sizeof(Scale) * GROUP;  // numbers whose scales are a piece
constexpr int PARTS = SPAN / CHUNK;
constexpr int LAG = STAGES / 2;  // chunks that are on their way before one is awaited
// A chunk's room is given back while the next one is multiplied, which has to be announced before.
static_assert(LAG + 2 <= STAGES, "the loading threads would wait for themselves");
SHARED_PIECES(memory);
Piece* const stages = memory + (64 - shared_place(memory) / 16 % 64) % 64;
Piece* const ring = stages + STAGES * STAGE;
__shared__ unsigned long long arrivals[STAGES];
__shared__ unsigned long long rooms[STAGES];
const int thread_index = threadIdx.x;
const int lane = thread_index % 32;
const int num_rows = x_shape[0];
const int depth = x_shape[2];
const int width = weight_shape[0] / (GATE ? 2 : 1);
const int columns = (width + OWN - 1) / OWN;
const int split = blockIdx.x % SPLITS;
const int first = blockIdx.x / SPLITS % columns * OWN;
const int base = blockIdx.x / SPLITS / columns * ROWS;
const int first_span = depth / SPAN * split / SPLITS;
const int spans = depth / SPAN * (split + 1) / SPLITS - first_span;
if (thread_index == 0) {
#pragma unroll
  for (int s = 0; s < STAGES; s++) {
    open_arrival(&arrivals[s], LOADERS / 32);
    open_arrival(&rooms[s], MULTIPLIERS / 32);
  }
}
__syncthreads();
if (thread_index >= MULTIPLIERS) {
  // 1. Load chunks. Pieces are in such an order that lanes use different banks. Rows beyond the end
  // of x are zeros, those beyond the weight's end are read as the last one. A thread loads pieces
  // LOADERS apart: their places differ by constants.
#if REGISTERS
  give_registers<LOADER_REGISTERS>();
#endif
  const int loader = thread_index - MULTIPLIERS;
  const int x_row = base + loader / 8;
  const T* x_from[X_SLAB / LOADERS];
#pragma unroll
  for (int j = 0; j < X_SLAB / LOADERS; j++) {
    const int row = min(x_row + j * (LOADERS / 8), num_rows - 1);
    x_from[j] = x + (Place)row * depth + first_span * SPAN + loader % 8 * 8;
  }
  const auto row_of = [&](int row) -> Place {
    return min(first + row % OWN, width - 1) + row / OWN * width;
  };
  constexpr int TURNS = SLABS * SLAB / LOADERS;
  const Piece* from[TURNS];
#pragma unroll
  for (int j = 0; j < TURNS; j++) {
    const int i = j * LOADERS % SLAB + loader;
    from[j] = (const Piece*)weight + row_of(i / PIECES) * (depth / 128 * BITS);
    from[j] += j * LOADERS / SLAB * PIECES + i % PIECES + first_span * (SPAN / 64) * PIECES;
  }
  const int x_to = loader ^ loader / 8 % 8;
  const int to = WEIGHTS + (loader ^ loader / 8 % PIECES);
  int stage_index = 0;
  int parity = 1;
  int awaited = 0;
  const auto announce = [&]() {
    publish();
    __syncwarp();
    arrive(&arrivals[awaited], lane == 0);
    awaited = awaited + 1 == STAGES ? 0 : awaited + 1;
  };
  int c = 0;
  for (int span = 0; span < spans; span++) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      if (c >= STAGES) {
        await_arrival(&rooms[stage_index], parity);
      }
      Piece* const stage = stages + stage_index * STAGE;
      Piece* const x_stage = stage + x_to;
#pragma unroll
      for (int j = 0; j < SLABS * X_SLAB / LOADERS; j++) {
        const int turn = j % (X_SLAB / LOADERS);
        const T* piece = x_from[turn] + part * CHUNK + j * LOADERS / X_SLAB * 64;
        const bool exists = x_row + turn * (LOADERS / 8) < num_rows;
        fetch(x_stage + j * LOADERS, (const Piece*)piece, exists);
      }
      Piece* const weight_stage = stage + to;
#pragma unroll
      for (int j = 0; j < TURNS; j++) {
        fetch(weight_stage + j * LOADERS, from[j] + part * SLABS * PIECES, true);
      }
      if (part == 0) {
        Piece* const scale_to = ring + span % RING * ARRAYS * WIDE;
#pragma unroll
        for (int j = 0; j < (ARRAYS * WIDE + LOADERS - 1) / LOADERS; j++) {
          const int i = j * LOADERS + loader;
          if (ARRAYS * WIDE % LOADERS == 0 || i < ARRAYS * WIDE) {
            const Place place = row_of(i % WIDE) * (depth / SPAN) + first_span + span;
#if MXFP4
            fetch(scale_to + i, (const Piece*)scales + place, true);
#else
            fetch(scale_to + i, (const Piece*)(i < WIDE ? scales : biases) + place, true);
#endif
          }
        }
      }
      close_fetches();
      if (c >= LAG) {
        await_fetches<LAG>();
        announce();
      }
      c++;
      stage_index = stage_index + 1 == STAGES ? 0 : stage_index + 1;
      parity ^= stage_index == 0;
    }
#pragma unroll
    for (int j = 0; j < X_SLAB / LOADERS; j++) {
      x_from[j] += SPAN;
    }
#pragma unroll
    for (int j = 0; j < TURNS; j++) {
      from[j] += PARTS * SLABS * PIECES;
    }
  }
#pragma unroll
  for (int i = 0; i < LAG; i++) {
    close_fetches();
    await_fetches<LAG>();
    if (c + i >= LAG) {
      announce();
    }
  }
} else {
  // 2. Multiply. A lane unpacks neighbouring numbers of two rows: two of each piece of x.
#if REGISTERS
  take_registers<REGISTERS>();
#endif
  const int warp = thread_index / 32;
  const int at = lane % 4;
  const int own_slab = warp / (WIDE / 16);
  const int own_row = warp % (WIDE / 16) * 16 + lane / 4;
#if BITS == 4
  const unsigned selector = at * 0x0011 + (at + 4) * 0x1100;
  // The compiler would move a constant to a register before every use.
  const unsigned mask = num_rows < 0 ? 0 : LEVELS;
#else
  const unsigned selector = 0x7404 + at % 2 * 0x20;
  // The compiler would move a constant to a register before every use.
  const unsigned bytes = num_rows < 0 ? 0 : BYTES;
#endif
  // Where a stage has the pieces of the lane's first row; those of the other one are a constant
  // further.
  int places[PIECES];
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const int piece = p ^ own_row * PIECES / 8 % PIECES;
    places[p] = (WEIGHTS + own_slab * SLAB + own_row * PIECES + piece) * 16;
#if BITS == 8
    places[p] += at / 2 * 4;
#endif
  }
  constexpr int NEXT_ROW = 8 * PIECES * 16;
  float sums[ROWS / TILE_ROWS][TILE_ROWS / 2] = {};
  unsigned values[2][2][4];
  Group groups[2];
  int stage_index = 0;
  int parity = 0;
  const int chunks = spans * PARTS;
#pragma unroll 1
  for (int c = 0; c < chunks; c++) {
    const int part = c % PARTS;
    await_arrival(&arrivals[stage_index], parity);
    const Piece* const stage = stages + stage_index * STAGE;
    const auto tiles = columns_at(stage + own_slab * X_SLAB);
    const Scale* own_scales = (const Scale*)(ring + c / PARTS % RING * ARRAYS * WIDE + own_row);
    own_scales += own_slab * 64 / GROUP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (GROUP < 64 || half == 0) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          // Of slabs that share a group, a place was rounded down above.
          const Scale* scale = own_scales + h * (8 * 16 / (int)sizeof(Scale));
          scale += GROUP < 64 ? part * (CHUNK / GROUP) + half : part * CHUNK / GROUP;
          groups[h] = Format::group(*scale, scale[(ARRAYS - 1) * WIDE * 16 / (int)sizeof(Scale)]);
        }
      }
      await_tiles<1>();
      // The products of the chunk before are done.
      if (half == 1) {
        __syncwarp();
        arrive(&rooms[stage_index == 0 ? STAGES - 1 : stage_index - 1], c > 0 && lane == 0);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const Group group = groups[h];
#pragma unroll
        for (int n = 0; n < 2; n++) {
#if BITS == 4
          const char* place = (const char*)stage + places[half] + h * NEXT_ROW;
          const unsigned* words = (const unsigned*)place + n * 2;
          const unsigned both = __byte_perm(words[0], words[1], selector);
          const unsigned even = Format::two(both, group, mask);
          const unsigned odd = Format::two(both >> 4, group, mask);
          values[half][n][h] = __byte_perm(even, odd, 0x5410);
          values[half][n][2 + h] = __byte_perm(even, odd, 0x7632);
#else
          const char* place = (const char*)stage + places[half * 2 + n] + h * NEXT_ROW;
          const unsigned low = ((const unsigned*)place)[0];
          const unsigned high = ((const unsigned*)place)[2];
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
          const auto tile = tiles + (t * TILE_ROWS * 8 + (half * 2 + n) * 2);
          multiply_tile(sums[t], values[half][n], tile, T(0.0f));
        }
      }
      end_tiles();
    }
    stage_index = stage_index + 1 == STAGES ? 0 : stage_index + 1;
    parity ^= stage_index == 0;
  }
  await_tiles<0>();
  meet<MULTIPLIERS>();

  // 3. Add the slabs' sums.
  constexpr int LINE = WIDE + 4;
  float* const parts = (float*)stages;  // [SLABS][ROWS][LINE]
#pragma unroll
  for (int t = 0; t < ROWS / TILE_ROWS; t++) {
#pragma unroll
    for (int i = 0; i < TILE_ROWS / 2; i++) {
      const int row = t * TILE_ROWS + i / 4 * 8 + at * 2 + i % 2;
      parts[(own_slab * ROWS + row) * LINE + own_row + i % 4 / 2 * 8] = sums[t][i];
    }
  }
  meet<MULTIPLIERS>();
  for (int i = thread_index; i < ROWS * OWN / 2; i += MULTIPLIERS) {
    const int row = i / (OWN / 2);
    const int column = i % (OWN / 2) * 2;
    if (base + row < num_rows && first + column < width) {
      float both[GATE ? 4 : 2] = {};
#pragma unroll
      for (int s = 0; s < SLABS; s++) {
#pragma unroll
        for (int n = 0; n < (GATE ? 4 : 2); n++) {
          both[n] += parts[(s * ROWS + row) * LINE + n / 2 * OWN + column + n % 2];
        }
      }
#if GATE
      both[0] = float(gated(both[0], both[2], T(0.0f)));
      both[1] = float(gated(both[1], both[3], T(0.0f)));
#endif
      const Place place = ((Place)split * num_rows + base + row) * width + first + column;
#if SPLITS > 1
      out[place] = both[0];
      if (first + column + 1 < width) {
        out[place + 1] = both[1];
      }
#else
      T* const to = out + place;
      if (width % 2 == 0) {
        *(unsigned*)to = packed(both[0], both[1], T(0.0f));
      } else {
        // A row may begin within a word, and ends with one number.
        to[0] = T(both[0]);
        if (first + column + 1 < width) {
          to[1] = T(both[1]);
        }
      }
#endif
    }
  }
}
