// A threadgroup multiplies WIDE rows of a packed weight with ROWS rows of x, a tile, by products
// of warpgroups. One warpgroup copies chunks of the depth to shared memory, STAGES of them at a
// time; the others multiply those that have come, and unpack values into registers meanwhile. They
// divide the rows of the weight and, by SLABS, the chunk: 64 numbers each. Nobody waits for all
// others: a chunk is announced when it has come, and its room is given back when all warps have
// multiplied it. If there are more tiles than threadgroups, one goes on with another tile, whose
// chunks are copied while sums of the one before are written; not so with SLABS, whose sums of the
// same rows are added in the room of the chunks. If the last tiles would leave half of the
// threadgroups idle, DIVIDES lets two of these divide the depth of each: the later one waits for
// the other one's sums. SPLITS threadgroups divide the depth of the same rows: outputs are then
// float32, and another kernel adds. The scales of RING spans are in shared memory: those of the
// chunks that are there. With GATE, 8 of 16 rows are gates, and 8 are the numbers that these
// multiply (SwiGLU), so that a lane has both.
#if MXFP4
using Format = Mxfp4<T>;
#elif BITS == 4
using Format = Affine4<T>;
#else
using Format = Affine8<T>;
#endif
using Scale = Format::Scale;
#if SPLITS > 1
using Output = float;
#else
using Output = T;
#endif
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
// Numbers of 4 bits are loaded from shared memory while the products before are computed. With
// those of 8 bits, which take 16 registers, with fewer rows and with SLABS that was slower.
constexpr bool AHEAD = BITS == 4 && ROWS == 256 && SLABS == 1;
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
const int bases = (num_rows + ROWS - 1) / ROWS;
const int tiles = bases * columns * SPLITS;
#if DIVIDES
static_assert(SLABS == 1 && SPLITS == 1, "sums would be in two places");
const int rest = tiles % THREADGROUPS;
const int divided = 2 * rest <= THREADGROUPS ? rest : 0;
#else
constexpr int divided = 0;
#endif
const int whole = tiles - divided;
const int items = tiles + divided;
// A tile, or half of the depth of one. First halves come first, so that their sums are there when
// the second ones, which come last, are to add them. Tiles with the same rows of the weight are
// computed at the same time, so that it is read once.
struct Item {
  int first, base;  // of outputs and of rows of x
  int split, first_span, spans;
  int number;  // of a tile that is divided
  int half;    // -1: all of it
};
const auto item_at = [&](int i) -> Item {
  const int half = i < divided ? 0 : i < tiles ? -1 : 1;
  const int number = half == 1 ? i - tiles : i;
  const int tile = half < 0 ? i - divided : whole + number;
  const int split = tile / bases / columns;
  const int part = half < 0 ? split : half;
  const int parts_of_depth = half < 0 ? SPLITS : 2;
  const int first_span = depth / SPAN * part / parts_of_depth;
  return {
      tile / bases % columns * OWN, tile % bases * ROWS, split, first_span,
      depth / SPAN * (part + 1) / parts_of_depth - first_span, number, half};
};
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
  constexpr int TURNS = SLABS * SLAB / LOADERS;
  const int x_to = loader ^ loader / 8 % 8;
  const int to = WEIGHTS + (loader ^ loader / 8 % PIECES);
  int stage_index = 0;
  int parity = 1;
  int awaited = 0;
  int ring_index = 0;
  int c = 0;
  const auto announce = [&]() {
    publish();
    __syncwarp();
    arrive(&arrivals[awaited], lane == 0);
    awaited = awaited + 1 == STAGES ? 0 : awaited + 1;
  };
  for (int i = blockIdx.x; i < items; i = SLABS == 1 ? i + gridDim.x : items) {
    const Item item = item_at(i);
    const int x_row = item.base + loader / 8;
    const T* x_from[X_SLAB / LOADERS];
#pragma unroll
    for (int j = 0; j < X_SLAB / LOADERS; j++) {
      const int row = min(x_row + j * (LOADERS / 8), num_rows - 1);
      x_from[j] = x + (Place)row * depth + item.first_span * SPAN + loader % 8 * 8;
    }
    const auto row_of = [&](int row) -> Place {
#if GATE
      return min(item.first + row / 16 * 8 + row % 8, width - 1) + row / 8 % 2 * width;
#else
      return min(item.first + row, width - 1);
#endif
    };
    const Piece* from[TURNS];
#pragma unroll
    for (int j = 0; j < TURNS; j++) {
      const int piece = j * LOADERS % SLAB + loader;
      from[j] = (const Piece*)weight + row_of(piece / PIECES) * (depth / 128 * BITS);
      from[j] += j * LOADERS / SLAB * PIECES + piece % PIECES;
      from[j] += item.first_span * (SPAN / 64) * PIECES;
    }
    for (int span = 0; span < item.spans; span++) {
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
          Piece* const scale_to = ring + ring_index * ARRAYS * WIDE;
#pragma unroll
          for (int j = 0; j < (ARRAYS * WIDE + LOADERS - 1) / LOADERS; j++) {
            const int k = j * LOADERS + loader;
            if (ARRAYS * WIDE % LOADERS == 0 || k < ARRAYS * WIDE) {
              const Place place = row_of(k % WIDE) * (depth / SPAN) + item.first_span + span;
#if MXFP4
              fetch(scale_to + k, (const Piece*)scales + place, true);
#else
              fetch(scale_to + k, (const Piece*)(k < WIDE ? scales : biases) + place, true);
#endif
            }
          }
          ring_index = ring_index + 1 == RING ? 0 : ring_index + 1;
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
        keep(x_from[j]);
      }
#pragma unroll
      for (int j = 0; j < TURNS; j++) {
        from[j] += PARTS * SLABS * PIECES;
        keep(from[j]);
      }
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
  float sums[ROWS / 2];
  unsigned words[4][2][2];
  Group groups[2][2];
  int stage_index = 0;
  int parity = 0;
  int first_ring = 0;
  // Loads what turns the numbers of half of a chunk into values.
  const auto load_groups = [&](int chunk, int half) {
    if (half == 1 && GROUP >= 64) {
      return;
    }
    const int part = chunk % PARTS;
    const int ring_index = (first_ring + chunk / PARTS) % RING;
    const Scale* own_scales = (const Scale*)(ring + ring_index * ARRAYS * WIDE + own_row);
    own_scales += own_slab * 64 / GROUP;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      // Of slabs that share a group, a place was rounded down above.
      const Scale* scale = own_scales + h * (8 * 16 / (int)sizeof(Scale));
      scale += GROUP < 64 ? part * (CHUNK / GROUP) + half : part * CHUNK / GROUP;
      const unsigned bias = scale[(ARRAYS - 1) * WIDE * 16 / (int)sizeof(Scale)];
      groups[half][h] = Format::group(*scale, bias);
    }
  };
  const auto load_words = [&](int half) {
    const char* const stage = (const char*)(stages + stage_index * STAGE);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
#if BITS == 4
        const char* const from = stage + places[half] + h * NEXT_ROW + n * 8;
        words[half * 2 + n][h][1] = ((const unsigned*)from)[1];
#else
        const char* const from = stage + places[half * 2 + n] + h * NEXT_ROW;
        words[half * 2 + n][h][1] = ((const unsigned*)from)[2];
#endif
        words[half * 2 + n][h][0] = ((const unsigned*)from)[0];
      }
    }
  };
  const auto load_chunk = [&](int chunk) {
    await_arrival(&arrivals[stage_index], parity);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      load_groups(chunk, half);
      load_words(half);
    }
  };
  const auto first_x_tile = columns_at(stages + own_slab * X_SLAB);
  for (int i = blockIdx.x; i < items; i = SLABS == 1 ? i + gridDim.x : items) {
    const Item item = item_at(i);
    const int chunks = item.spans * PARTS;
    unsigned values[2][2][4];
#pragma unroll
    for (int j = 0; j < ROWS / 2; j++) {
      sums[j] = 0.0f;
    }
    if (AHEAD && chunks > 0) {
      load_chunk(0);
    }
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
      if (!AHEAD) {
        await_arrival(&arrivals[stage_index], parity);
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (!AHEAD) {
          load_groups(c, half);
        }
        await_tiles<1>();
        // The products of the chunk before are done.
        if (half == 1) {
          __syncwarp();
          arrive(&rooms[stage_index == 0 ? STAGES - 1 : stage_index - 1], c > 0 && lane == 0);
        }
        if (!AHEAD) {
          load_words(half);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
          unsigned (&own_values)[4] = values[half][n];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const Group group = groups[GROUP < 64 ? half : 0][h];
            const unsigned (&own)[2] = words[half * 2 + n][h];
#if BITS == 4
            const unsigned both = __byte_perm(own[0], own[1], selector);
            const unsigned even = Format::two(both, group, mask);
            const unsigned odd = Format::two(both >> 4, group, mask);
            own_values[h] = __byte_perm(even, odd, 0x5410);
            own_values[2 + h] = __byte_perm(even, odd, 0x7632);
#else
            own_values[h] = Format::two(own[0], own[0], selector, selector + 16, group, bytes);
            own_values[2 + h] = Format::two(own[1], own[1], selector, selector + 16, group, bytes);
#endif
          }
        }
        begin_tiles();
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const auto x_tile = first_x_tile + (stage_index * STAGE + (half * 2 + n) * 2);
          multiply_tile(sums, values[half][n], x_tile, T(0.0f));
        }
        end_tiles();
      }
      stage_index = stage_index + 1 == STAGES ? 0 : stage_index + 1;
      parity ^= stage_index == 0;
      if (AHEAD && c + 1 < chunks) {
        load_chunk(c + 1);
      }
    }
    await_sums(sums);
    __syncwarp();
    arrive(&rooms[stage_index == 0 ? STAGES - 1 : stage_index - 1], chunks > 0 && lane == 0);
    first_ring = (first_ring + item.spans) % RING;

#if DIVIDES
    if (item.half >= 0) {
      Piece* const half_sums =
          (Piece*)parts + (Place)item.number * (ROWS / 8 * MULTIPLIERS) + thread_index;
      if (item.half == 0) {
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) {
          Piece four;
#pragma unroll
          for (int n = 0; n < 4; n++) {
            four.at[n] = __float_as_uint(sums[j * 4 + n]);
          }
          half_sums[j * MULTIPLIERS] = four;
        }
        arrive_threadgroup<MULTIPLIERS>((unsigned*)arrivals_pool + item.number);
        continue;
      }
      await_threadgroups<MULTIPLIERS>(arrivals_pool + item.number, 1);
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        const Piece four = half_sums[j * MULTIPLIERS];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          sums[j * 4 + n] += __uint_as_float(four.at[n]);
        }
      }
    }
#endif

    // 3. Write the sums of all slabs.
    const Place out_row = (Place)item.split * num_rows;
#if SLABS == 1
#pragma unroll
    for (int j = 0; j < ROWS / 2; j++) {
      const int row = item.base + j / 4 * 8 + at * 2 + j % 2;
#if GATE
      const int column = item.first + warp * 8 + lane / 4;
      if (j % 4 < 2) {
        const T number = gated(sums[j], sums[j + 2], T(0.0f));
        if (row < num_rows && column < width) {
          out[(out_row + row) * width + column] = number;
        }
      }
#else
      const int column = item.first + own_row + j % 4 / 2 * 8;
      if (row < num_rows && column < width) {
        out[(out_row + row) * width + column] = Output(sums[j]);
      }
#endif
    }
#else
    constexpr int LINE = WIDE + 4;
    float* const slab_sums = (float*)stages;  // [SLABS][ROWS][LINE]
    meet<MULTIPLIERS>();
#pragma unroll
    for (int j = 0; j < ROWS / 2; j++) {
      const int row = j / 4 * 8 + at * 2 + j % 2;
      slab_sums[(own_slab * ROWS + row) * LINE + own_row + j % 4 / 2 * 8] = sums[j];
    }
    meet<MULTIPLIERS>();
    for (int k = thread_index; k < ROWS * OWN / 2; k += MULTIPLIERS) {
      const int row = item.base + k / (OWN / 2);
      const int own = k % (OWN / 2) * 2;
      const int column = item.first + own;
      if (row < num_rows && column < width) {
        const float* from = slab_sums + k / (OWN / 2) * LINE + (GATE ? own / 8 * 16 + own % 8 : own);
        float both[GATE ? 4 : 2] = {};
#pragma unroll
        for (int s = 0; s < SLABS; s++) {
#pragma unroll
          for (int n = 0; n < (GATE ? 4 : 2); n++) {
            both[n] += from[s * ROWS * LINE + n / 2 * 8 + n % 2];
          }
        }
#if GATE
        both[0] = float(gated(both[0], both[2], T(0.0f)));
        both[1] = float(gated(both[1], both[3], T(0.0f)));
#endif
        Output* const to = out + (out_row + row) * width + column;
#if SPLITS == 1
        if (width % 2 == 0) {
          *(unsigned*)to = packed(both[0], both[1], T(0.0f));
          continue;
        }
#endif
        // A row may begin within a word, and ends with one number.
        to[0] = Output(both[0]);
        if (column + 1 < width) {
          to[1] = Output(both[1]);
        }
      }
    }
#endif
  }
}
